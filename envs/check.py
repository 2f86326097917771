"""Run an environment against the contract of `envs.base` and say, in words, what is wrong with it.

python -m envs.check my_env.py
python -m envs.check envs.sokoban --seed 3 --set render_mode=text
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from random import Random
from typing import Any

from PIL import Image

from envs.loader import check_methods, check_settings, load_env, load_module, raised, system_prompt
from envs.play import parser, settings
from shared.types import Sample

MAX_TEXT, MAX_PIXELS, MAX_IMAGES = 50_000, 4_194_304, 16
ANSWERS = ("", "hello", "<answer>up, left</answer>", "\\boxed{60}", "上" * 50, "x" * 20_000, "\x00\ufffd<|im_end|>")


class Hung(Exception):
    """A call did not return in time."""


@dataclass(slots=True)
class Check:
    """What was found. `problems` break the contract, `notes` are worth knowing."""

    limit_s: float = 30.0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def problem(self, text: str) -> None:
        if text not in self.problems:
            self.problems.append(text)

    def call(self, what: str, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """The result of a call; Hung after `limit_s`; what it raises is passed on."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(function(*args, **named))
            except BaseException as error:  # noqa: BLE001  handed to the caller below
                future.set_exception(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(self.limit_s)
        if not future.done():
            raise Hung(f"{what} did not return within {self.limit_s:g} s")
        return future.result()


def check_env(path: str, args: Mapping[str, Any] | None = None, seed: int = 0, limit_s: float = 30.0) -> Check:
    """Check the environment at `path` with samples of two seeds."""
    check = Check(limit_s)
    args = {"max_turns": 8, **(args or {})}
    try:
        module, build_env = load_module(path), load_env(path)
        check_settings(module, args, "--set")
        if not system_prompt(module, args):
            check.notes.append("there is no SYSTEM_PROMPT: the model is told nothing before the first observation")
        if hasattr(module, "episode_reward") and not callable(module.episode_reward):
            check.problem("episode_reward is not a function")
        records = [_episode(check, module, build_env, args, number) for number in (seed, seed, seed + 1)]
    except Hung as error:
        check.problem(str(error))
    except ValueError as error:
        check.problem(" ".join(str(error).split()))
    except (Exception, SystemExit) as error:  # noqa: BLE001  whatever the environment raises is what is reported
        check.problem(f"it raised {raised(error)}")
    else:
        if records[0] != records[1]:
            check.problem("two episodes of the same sample with the same answers differ: draw from Random(seed) only")
        if records[0] == records[2]:
            check.notes.append("samples with other seeds give the same episode: is metadata['seed'] used?")
    return check


def _episode(check: Check, module: Any, build_env: Callable[..., Any], args: Mapping[str, Any], seed: int) -> list[Any]:
    """Play an episode; everything that must be the same when it is played again."""
    sample = Sample(id=f"check-{seed}", metadata={"seed": seed})
    env = check.call("build_env", build_env, sample=sample, args=args)
    check_methods(env)
    first = _reset(check, env)
    record = [first]
    if _reset(check, env) != first:
        check.problem("a second reset() gives another observation: reset must start the same episode again")
    rng = Random(seed)
    rewards = []
    for turn in range(int(args["max_turns"])):
        answer = rng.choice(ANSWERS)
        if hasattr(module, "random_response") and turn % 2:
            answer = module.random_response(rng)
        result = check.call("step", env.step, answer)
        if not (isinstance(result, tuple) and len(result) == 3):
            raise ValueError(f"step returned {type(result).__name__}, not (observation, done, info)")
        observation, done, info = result
        if not isinstance(done, bool):
            check.problem(f"step returned done = {done!r}, which is {type(done).__name__}, not bool")
        rewards.append(_reward(check, info))
        record.append((_seen(check, env, observation), bool(done), rewards[-1]))
        if done:
            break
    if callable(getattr(module, "episode_reward", None)):
        value = check.call("episode_reward", module.episode_reward, env)
        if not _is_number(value):
            check.problem(f"episode_reward returned {value!r}, not a finite number")
        record.append(value)
    check.call("close", env.close)
    return record


def _reset(check: Check, env: Any) -> Any:
    result = check.call("reset", env.reset)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
        raise ValueError(f"reset returned {type(result).__name__}, not (observation, info)")
    return _seen(check, env, result[0]) if result[0] != {} else ()


def _seen(check: Check, env: Any, observation: Any) -> Any:
    """Text and image bytes of an observation, after checking it and the message made of it."""
    if not isinstance(observation, dict) or not isinstance(observation.get("obs_str"), str):
        raise ValueError(f"the observation {str(observation)[:60]!r} is no dict with a text at 'obs_str'")
    if len(observation["obs_str"]) > MAX_TEXT:
        check.problem(f"obs_str has {len(observation['obs_str'])} characters; keep it under {MAX_TEXT}")
    groups = observation.get("multi_modal_data") or {}
    if not isinstance(groups, dict):
        raise ValueError("multi_modal_data is no dict such as {'image': [image]}")
    images = [image for group in groups.values() for image in group]
    for image in images:
        if not isinstance(image, Image.Image):
            raise ValueError(f"an image is {type(image).__name__}, not a PIL image")
        if image.width * image.height > MAX_PIXELS:
            check.problem(f"an image of {image.width}x{image.height} has over {MAX_PIXELS} pixels: draw it smaller")
    if len(images) > MAX_IMAGES:
        check.problem(f"an observation holds {len(images)} images; keep it to {MAX_IMAGES}")
    _check_message(check, check.call("format_observation", env.format_observation, observation), len(images))
    return observation["obs_str"], tuple((image.mode, image.size, image.tobytes()) for image in images)


def _check_message(check: Check, message: Any, num_images: int) -> None:
    if not isinstance(message, dict) or "role" not in message or "content" not in message:
        raise ValueError("format_observation returned no message with 'role' and 'content'")
    if message["role"] != "user":
        check.problem(f"format_observation gives the role {message['role']!r}; observations are the user's")
    content = message["content"]
    if isinstance(content, str):
        kinds = ["text"]
    elif isinstance(content, list) and all(isinstance(part, dict) and "type" in part for part in content):
        kinds = [part["type"] for part in content]
    else:
        raise ValueError("a message's content is neither text nor a list of parts with a 'type'")
    if set(kinds) - {"image", "text"}:
        check.problem(f"a message has parts of the types {sorted(set(kinds) - {'image', 'text'})}; use image and text")
    if kinds.count("image") != num_images:
        check.problem(f"the observation has {num_images} images, the message {kinds.count('image')}")
    if kinds != sorted(kinds):
        check.problem("a message has text before an image: images come first")


def _reward(check: Check, info: Any) -> float:
    if not isinstance(info, dict):
        raise ValueError(f"step returned an info of type {type(info).__name__}, not dict")
    reward = info.get("reward", 0.0)
    if not _is_number(reward):
        check.problem(f"info['reward'] is {reward!r}, not a finite number")
        return 0.0
    _check_metrics(check, info.get("metrics") or {}, depth=0)
    return float(reward)


def _check_metrics(check: Check, metrics: Any, depth: int) -> None:
    if not isinstance(metrics, dict) or depth > 1:
        check.problem(f"info['metrics'] is {str(metrics)[:60]!r}: use numbers, or one level of dicts of numbers")
        return
    for name, value in metrics.items():
        if isinstance(value, dict):
            _check_metrics(check, value, depth + 1)
        elif not _is_number(value):
            check.problem(f"the metric {name!r} is {value!r}, not a finite number")


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float)) and math.isfinite(value)


def main(argv: list[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--limit", type=float, default=30.0, help="seconds that one call may take")
    chosen = options.parse_args(argv)
    try:
        check = check_env(chosen.module, settings(chosen), chosen.seed, chosen.limit)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for text in check.problems:
        print(f"problem: {text}")
    for text in check.notes:
        print(f"note: {text}")
    if not check.problems:
        print(f"ok: {chosen.module} keeps the contract")
    return 1 if check.problems else 0


if __name__ == "__main__":
    sys.exit(main())
