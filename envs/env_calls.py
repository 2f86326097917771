"""Calls an environment as an actor does, and checks what it returns: `play`, `check`, `show` and the actors use these
functions, so that what one of them accepts the others accept too.

`build_env`, `reset`, `step`, `format_observation`, `close` and `episode_reward` may be coroutines. Those of one
environment run on one event loop, from the first of them until `close_env`.
"""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from random import Random
from typing import Any

import numpy as np
from PIL import Image

from envs.base import Env, Info, Observation
from envs.env_loops import EnvLoop, interrupt
from envs.messages import split_images
from envs.states import state_key
from shared.util.user_errors import UserCodeExit, in_words

NAME_CHARACTERS = 128  # of a metric
NO_NUMBER, NOT_FINITE = "no number", "not finite"
GYMNASIUM = "(observation, reward, terminated, truncated, info)"
GYM = "(observation, reward, done, info)"
# The environments that have a loop, by identity: their classes may have slots, or no hash.
_loops: dict[int, tuple[Any, EnvLoop]] = {}


class CallHung(Exception):
    """A call did not return in time."""


def call_within(limit_s: float, what: str, function: Callable[[], Any]) -> Any:
    """Return the result of a call or raise its exception; raise CallHung, which names the call `what`, after `limit_s`.
    A call that hangs keeps its thread, which does not keep the process; a coroutine is cancelled."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except (Exception, SystemExit) as error:  # noqa: BLE001  raised in the caller below
            future.set_exception(error)
        except BaseException as error:  # noqa: BLE001  in a thread it is no Ctrl-C
            future.set_exception(UserCodeExit(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    if not future.done():
        if thread.ident is not None:
            interrupt(thread.ident)
        raise CallHung(f"{what} did not return within {limit_s:g} s")
    return future.result()


def play_a_turn(build: Callable[[], Any], answer: str = "hello", *, has_states: bool = False) -> None:
    """Build an environment and play its first turn, as an actor would. Raise what the environment raises, and TypeError
    or ValueError for a result of another form, or without a state if it is to have states."""
    env = build()
    check_methods(env)
    observation, start = reset_env(env)
    if has_states and not (isinstance(start, dict) and start.get("state")):
        raise ValueError(
            f"the info of reset of {_name(env)} has no 'state', by which learner.objective.turn_advantage = 'state' "
            "compares turns; let reset and step return one, or set that to 'returns'"
        )
    if observation:
        messages_of(env, observation)
    observation, done, info = step_env(env, answer)
    if not is_number(reward := info.get("reward", 0.0)):
        raise TypeError(f"info['reward'] of {_name(env)} is {in_words(reward)}, not a finite number")
    if not done:
        messages_of(env, observation)
    close_env(env)


def make_env(build_env: Callable[..., Any], **arguments: Any) -> Any:
    """Return what `build_env` returns for these arguments."""
    env = build_env(**arguments)
    if not inspect.isawaitable(env):
        return env
    loop = EnvLoop()
    try:
        env = loop.run(env)
    except BaseException:
        loop.close()
        raise
    _loops[id(env)] = env, loop
    return env


def check_methods(env: Any) -> None:
    """Raise ValueError if `env`, which `build_env` returned, lacks a method that an environment must have."""
    if isinstance(env, type):
        raise ValueError(f"build_env returned the class {env.__name__}, not an object of it: return {env.__name__}(…)")
    for name in ("reset", "step"):
        if not callable(getattr(env, name, None)):
            raise ValueError(f"build_env returned {type(env).__name__}, which has no method {name}")


def reset_env(env: Any) -> tuple[Observation, Info]:
    """Return the first observation ({} for none) and the info, with the key of its state in place of the state. Raise
    TypeError for a result of another form."""
    result = _returned(env, env.reset())
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(f"reset of {_name(env)} returned {_form(result)}, not (observation, info)")
    observation, info = result
    if observation is not None and not isinstance(observation, dict):
        raise TypeError(
            f"reset of {_name(env)} returned an observation of type {type(observation).__name__}, not a dict with a "
            "text at 'obs_str'"
        )
    return observation or {}, _with_key(info)


def step_env(env: Any, text: str) -> tuple[Observation, bool, Info]:
    """Return (next observation, whether the episode is over, info), with the key of the info's state in place of the
    state. Raise TypeError for a result of another form; the message names the cure for Gymnasium's five values and
    Gym's four."""
    result = _returned(env, env.step(text))
    if not isinstance(result, tuple) or len(result) != 3:
        cure = ""
        if isinstance(result, tuple) and len(result) == 5:
            cure = f"; these look like Gymnasium's {GYMNASIUM}: put the reward into info['reward'], and terminated or "
            cure += "truncated into done"
        elif isinstance(result, tuple) and len(result) == 4:
            cure = f"; these look like Gym's {GYM}: put the reward into info['reward']"
        raise TypeError(f"step of {_name(env)} returned {_form(result)}, not (observation, done, info){cure}")
    observation, done, info = result
    if not isinstance(done, (bool, np.bool_)):
        raise TypeError(f"step of {_name(env)} returned done = {in_words(done)}, which is {_type(done)}, not bool")
    if not isinstance(info, dict):
        raise TypeError(f"step of {_name(env)} returned an info of type {_type(info)}, not dict")
    return observation, bool(done), _with_key(info)


def _with_key(info: Any) -> Any:
    return {**info, "state": state_key(info["state"])} if isinstance(info, dict) and "state" in info else info


def messages_of(env: Any, observation: Observation) -> list[dict[str, Any]]:
    """Return the chat messages, one or several, that the environment makes of an observation, with its images in them.

    An item {"type": "image"} without an image takes the observation's next one. An environment without
    `format_observation` gets that of `Env`: the images, then the text. Raise TypeError or ValueError for a message that
    cannot be shown to a model.
    """
    make: Callable[[Observation], Any] | None = getattr(env, "format_observation", None)
    if make is None or getattr(type(env), "format_observation", None) is Env.format_observation:
        if not isinstance(observation, dict) or not isinstance(observation.get("obs_str", ""), str):
            raise TypeError(
                f"an observation of {_name(env)} is {in_words(observation)}, not a dict with a text at 'obs_str'"
            )
        images_of(observation)
        _check_is_read(env, observation)
        made: Any = Env.format_observation(env, observation)
    else:
        made = _returned(env, make(observation))
    what = f"the message that format_observation of {_name(env)} returned"
    messages = list(made) if isinstance(made, (list, tuple)) and made else [made]
    for message in messages:
        if not isinstance(message, dict) or "role" not in message or "content" not in message:
            raise TypeError(f"{what} is {in_words(message)}, not a dict with 'role' and 'content'")
    spare = iter(images_of(observation))
    messages = [_with_images(message, spare) for message in messages]
    try:
        split_images(messages, iter(()))
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
    return messages


def _with_images(message: dict[str, Any], spare: Iterator[Any]) -> dict[str, Any]:
    """Return a message whose items {"type": "image"} without an image have the next one of `spare`."""
    content = message["content"]
    if not isinstance(content, (list, tuple)):
        return message
    bare = [isinstance(part, dict) and part.get("type") == "image" and part.get("image") is None for part in content]
    parts = [
        {**part, "image": next(spare, None)} if is_bare else part for part, is_bare in zip(content, bare, strict=True)
    ]
    return {**message, "content": parts}


def _check_is_read(env: Any, observation: Observation) -> None:
    """Raise ValueError for an observation of which `Env.format_observation` shows nothing, or not all images: what it
    holds has another name."""
    other = {name: value for name, value in observation.items() if name not in ("obs_str", "multi_modal_data")}
    unseen = [name for name, value in other.items() if len(other) == len(observation) or _holds_images(value)]
    if unseen:
        raise ValueError(
            f"an observation of {_name(env)} has {', '.join(map(repr, unseen))}, which the model is never shown: the "
            "text stands at 'obs_str', images at 'multi_modal_data': {'image': [image]}; or write format_observation"
        )


def _holds_images(value: Any) -> bool:
    """Tell whether a value is an image, an array that may be one, or a list or dict of such."""
    if isinstance(value, (list, tuple, dict)):
        return any(map(_holds_images, value.values() if isinstance(value, dict) else value))
    return isinstance(value, Image.Image) or (isinstance(value, np.ndarray) and value.ndim == 3)


def images_of(observation: Any) -> list[Any]:
    """Return the images of an observation in order. Raise TypeError if they are not in lists."""
    groups = observation.get("multi_modal_data") if isinstance(observation, dict) else None
    if not groups:
        return []
    if not isinstance(groups, dict):
        raise TypeError(f"multi_modal_data is {in_words(groups)}, not a dict such as {{'image': [image]}}")
    for name, group in groups.items():
        if not isinstance(group, (list, tuple)):
            kind = type(group).__name__
            raise TypeError(f"multi_modal_data[{name!r}] is {kind}, not a list of images: write {{'image': [image]}}")
    return [image for group in groups.values() for image in group]


def close_env(env: Any) -> None:
    """Release what the environment holds, if it has a `close`, and its loop, if it has one."""
    try:
        close = getattr(env, "close", None)
        if callable(close):
            _returned(env, close())
    finally:
        if id(env) in _loops:
            _loops.pop(id(env))[1].close()


def responder(module: Any, env: Any) -> Callable[[Random], str] | None:
    """Return the function that answers like a policy that knows only the format: the environment's `random_response`,
    or its module's; None if there is neither."""
    own = getattr(env, "random_response", None) or getattr(module, "random_response", None)
    return own if callable(own) else None


def reward_of(episode_reward: Callable[[Any], Any], env: Any) -> Any:
    """Return what the module's `episode_reward(env)` returns."""
    return _returned(env, episode_reward(env))


def is_number(value: Any) -> bool:
    """Tell whether a value is a finite number: Python's, NumPy's, a fraction, or an array of one number without
    dimensions."""
    return getattr(value, "ndim", 0) == 0 and isinstance(number_of(value), float)


def number_of(value: Any) -> float | str:
    """Return a number from user code as a finite float, or why it is none. A text is no number, whatever it says."""
    if value is None or issubclass(type(value), str | bytes | bytearray):
        return NO_NUMBER
    try:
        number = float(value)
    except OverflowError:  # an integer beyond all floats
        return NOT_FINITE
    except BaseException:  # noqa: BLE001 - a user's object may raise anything
        return NO_NUMBER
    return number if math.isfinite(number) else NOT_FINITE


def is_metric_name(name: Any) -> bool:
    """Tell whether a metric can have this name: a printable text of 1 to `NAME_CHARACTERS` characters."""
    return issubclass(type(name), str) and 0 < len(name) <= NAME_CHARACTERS and name.isprintable()


def _returned(env: Any, result: Any) -> Any:
    """Return the result of a call; of a coroutine, what it returns on the environment's loop."""
    if not inspect.isawaitable(result):
        return result
    if id(env) not in _loops:
        _loops[id(env)] = env, EnvLoop()
    return _loops[id(env)][1].run(result)


def _name(env: Any) -> str:
    return type(env).__name__


def _type(value: Any) -> str:
    return type(value).__name__


def _form(value: Any) -> str:
    return f"{len(value)} values" if isinstance(value, tuple) else _type(value)
