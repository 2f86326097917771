"""Plays an environment of the library verifiers that goes turn by turn.

    [env]
    module = "envs.verifiers"
    args = {env = "my_env.py", args = {difficulty = "easy"}}

`env` is a file or an installed environment with `load_environment(**args)`, which returns a MultiTurnEnv or a
SingleTurnEnv of the interface that verifiers has up to 0.3 (there also as verifiers.legacy). A sample's seed chooses
the row of its dataset; held-out samples take the rows of its eval_dataset, or, without one, every tenth row, on which
nothing is trained. The rubric gives the reward of the whole episode; its functions' values are metrics.

| not supported | because |
|---|---|
| tools (ToolEnv, tool_defs) | the model's calls would have to be parsed by verifiers' client |
| EnvGroup, CLI and sandbox agents, any `rollout` of its own | they play the episode themselves |
| rewards that compare a group | an actor has one episode at a time |
| several system prompts | the one of the first row is the recipe's |
| images by URL; audio | images are data URIs |
| a model that the environment asks for (`get_model_response`) | there is no client; a judge brings its own |

All episodes of an actor share the environment object and one event loop, as under verifiers: what blocks that loop
delays the others.
"""

from __future__ import annotations

import asyncio
import base64
import copy
import functools
import inspect
import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
from PIL import Image as PILImage
from pydantic import Field

from envs.base import Env, Info, Observation, metadata_of
from envs.env_loops import EnvLoop
from envs.env_settings import EnvSettings, read_settings
from envs.loader import load_module
from shared.rgb_images import open_image
from shared.util.user_errors import describe, in_words

HELD_OUT_EVERY = 10
SCORES_AT_ONCE = 16
SYSTEM_ROWS = 1000  # rows whose system prompt is compared
_loading = threading.Lock()
_loops: dict[int, EnvLoop] = {}  # by process: a fork has none


class VerifiersSettings(EnvSettings):
    env: str = Field(
        ..., min_length=1, description="file with load_environment, or the name of an installed environment"
    )
    args: dict[str, Any] = Field(default_factory=dict, description="arguments of load_environment")


SETTINGS = VerifiersSettings


def system_prompt(args: Any = None) -> str:
    """Return the system message of the environment's rows."""
    return _loaded(read_settings(VerifiersSettings, None, args)).system_prompt


def build_env(sample: Any = None, args: Any = None, **_: Any) -> VerifiersEnv:
    """Return the environment of a sample. Raise ValueError, in one line, for an environment that is missing or that
    cannot be played turn by turn."""
    loaded = _loaded(read_settings(VerifiersSettings, None, args))
    metadata = metadata_of(sample)
    seed = int(metadata.get("seed", metadata.get("row", 0)))
    return VerifiersEnv(loaded, loaded.row(seed, held_out=metadata.get("split") == "heldout"))


def episode_reward(env: VerifiersEnv) -> Any:
    """Return the rubric's reward; of an episode that was cut off too."""
    return env.reward()


class VerifiersEnv(Env):
    """One episode: a row of the dataset, and verifiers' state of it."""

    def __init__(self, loaded: LoadedEnv, row: dict[str, Any]) -> None:
        self._loaded, self._row = loaded, row
        self._state: Any = None
        self._shown: list[Any] = []  # all messages so far
        self._is_scored = False

    def reset(self) -> tuple[Observation, Info]:
        return self._loaded.loop.run(self._start()), {}

    def step(self, response_text: str) -> tuple[Observation, bool, Info]:
        return self._loaded.loop.run(self._turn(response_text))

    def format_observation(self, observation: Observation) -> list[dict[str, Any]]:  # type: ignore[override]
        """Return the environment's messages."""
        return [_message(each) for each in observation["messages"]]

    def reward(self) -> Any:
        if not self._is_scored:
            self._loaded.loop.run(self._score())
        return self._state["reward"]

    def close(self) -> None:
        if (
            self._state is not None
            and not self._is_scored
            and callable(clean := getattr(self._loaded.env, "cleanup", 0))
        ):
            self._loaded.loop.run(_value(clean(self._state)))

    async def _start(self) -> Observation:
        env = self._loaded.env
        self._is_scored = False
        self._state = await self._loaded.new_state(copy.deepcopy(self._row))
        self._state = await _value(env.setup_state(self._state)) or self._state
        if await self._loaded.is_completed(self._state, self._shown):
            raise ValueError(f"{self._loaded.name}: the episode is over before its first answer")
        self._shown = list(await self._prompt())
        first = self._shown[1:] if _role(self._shown[0]) == "system" else self._shown
        return {"messages": first}

    async def _turn(self, text: str) -> tuple[Observation, bool, Info]:
        env, state = self._loaded.env, self._state
        answer = {"role": "assistant", "content": text}
        step: dict[str, Any] = {
            "prompt": self._shown,
            "completion": [answer],
            "response": None,
            "tokens": None,
            "reward": None,
        }
        step |= {"advantage": None, "is_truncated": False, "trajectory_id": state.get("trajectory_id"), "extras": {}}
        if callable(add := getattr(env, "add_trajectory_step", None)):
            await _value(add(state, step))
        else:
            state["trajectory"].append(step)
        before = [*self._shown, answer]
        self._shown = before
        done = await self._loaded.is_completed(state, before)
        if not done:
            self._shown = list(await self._prompt())
            done = state.get("final_env_response") is not None
        if not done:
            return {"messages": self._shown[len(before) :]}, False, {}
        await self._score()
        metrics = {name: value for name, value in (state.get("metrics") or {}).items() if isinstance(name, str)}
        return {}, True, {"reward": state["reward"], "metrics": metrics}

    async def _prompt(self) -> Any:
        """Return all messages before the next answer."""
        env, state = self._loaded.env, self._state
        if callable(getattr(env, "get_prompt_messages", None)):
            return await _value(env.get_prompt_messages(state))
        if not state["trajectory"]:
            return state["prompt"]
        response = await _value(env.env_response(self._shown, state))
        return [*self._shown, *(response[0] if isinstance(response, tuple) else response)]

    async def _score(self) -> None:
        """Let the rubric score the episode. Raise what one of its functions raises, which verifiers takes for 0."""
        env, state = self._loaded.env, self._state
        self._is_scored = True
        if callable(getattr(env, "cleanup", None)):
            await _value(env.cleanup(state))
        if state.get("completion") is None:
            state["completion"] = self._shown[len(state["prompt"]) :]
        failures: list[BaseException] = []
        _failures[id(state)] = failures
        try:
            score = env.rubric.score_rollout
            former = "score_sem" in inspect.signature(score).parameters  # before 0.1.10
            await _value(score(state, asyncio.Semaphore(SCORES_AT_ONCE)) if former else score(state))
        finally:
            del _failures[id(state)]
        if failures:
            raise failures[0]
        if callable(clean := getattr(env.rubric, "cleanup", None)):
            await _value(clean(state))


_failures: dict[int, list[BaseException]] = {}  # of reward functions, by the identity of the episode's state


class LoadedEnv:
    """An environment of verifiers', its rows, and the loop on which all of its episodes run."""

    def __init__(self, name: str, env: Any) -> None:
        self.name, self.env = name, env
        if os.getpid() not in _loops:
            _loops[os.getpid()] = EnvLoop()
        self.loop = _loops[os.getpid()]
        if why := _unplayable(env):
            raise ValueError(f"{name}: {why}")
        rows = _rows(env, "dataset")
        held_out = _rows(env, "eval_dataset")
        if rows is None and held_out is None:
            raise ValueError(f"{name} has no dataset")
        self._train = held_out if rows is None else rows
        self._split = rows is None or held_out is None
        self._held_out = self._train if held_out is None else held_out
        self.system_prompt = _system_of(self._train[0])
        for number in range(min(SYSTEM_ROWS, len(self._train))):
            if _system_of(self._train[number]) != self.system_prompt:
                raise ValueError(f"{name}: the system prompts of rows 0 and {number} differ, which is not supported")
        for rubric in _rubrics(env.rubric):
            rubric.funcs[:] = [_noted(function) for function in rubric.funcs]

    def row(self, seed: int, *, held_out: bool) -> dict[str, Any]:
        """Return the row of a seed."""
        rows = self._held_out if held_out else self._train
        count = len(rows)
        if not self._split or count < HELD_OUT_EVERY:
            return dict(rows[seed % count])
        if held_out:
            return dict(rows[seed % (count // HELD_OUT_EVERY) * HELD_OUT_EVERY])
        index = seed % (count - -(-count // HELD_OUT_EVERY))
        return dict(rows[index + index // (HELD_OUT_EVERY - 1) + 1])

    async def new_state(self, row: dict[str, Any]) -> Any:
        """Return verifiers' state at the start of a row."""
        row = {"answer": "", "info": {}, "example_id": 0} | row
        if callable(start := getattr(self.env, "init_state", None)):
            return await _value(start(row, client=_no_client(), model="policy", sampling_args={}))
        more: dict[str, Any] = {
            "trajectory": [],
            "completion": None,
            "reward": None,
            "metrics": None,
            "trajectory_id": uuid.uuid4().hex,
        }
        return row | more

    async def is_completed(self, state: Any, messages: list[Any]) -> bool:
        """Tell whether the episode is over; verifiers' former interface is given the messages too."""
        check = self.env.is_completed
        names = list(inspect.signature(check).parameters)
        return bool(await _value(check(messages, state) if names[:1] == ["messages"] else check(state)))


def _loaded(settings: VerifiersSettings) -> LoadedEnv:
    with _loading:
        return _load(os.getpid(), settings.env, msgspec.json.encode(settings.args))


@functools.cache
def _load(_: int, name: str, args: bytes) -> LoadedEnv:
    path = name if name.endswith(".py") else name.replace("-", "_").split("/")[-1]
    module = load_module(path, "load_environment")
    if not callable(load := getattr(module, "load_environment", None)):
        raise ValueError(f"env = {name!r} has no function load_environment")
    given = msgspec.json.decode(args)
    try:
        with _own_signals():
            env = load(**given)
    except (Exception, SystemExit) as error:
        raise ValueError(f"load_environment(**{given}) of {name} raised {describe(error)}") from error
    return LoadedEnv(name, env)


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep the process's signal handlers: an environment of verifiers' sets its own, which only the main thread may."""
    before = signal.signal
    signal.signal = lambda *_: None
    try:
        yield
    finally:
        signal.signal = before


def _unplayable(env: Any) -> str:
    """Return why an environment cannot be played turn by turn; "" if it can."""
    needed = ("env_response", "is_completed", "setup_state", "rubric")
    if missing := [name for name in needed if not hasattr(env, name)]:
        return f"it is no MultiTurnEnv or SingleTurnEnv: it has no {missing[0]}"
    if getattr(env, "tool_defs", None) or getattr(env, "tools", None) or getattr(env, "oai_tools", None):
        return "it has tools for the model, which are not supported"
    if not _rubrics(env.rubric):
        return "its rubric has no reward functions"
    for rubric in _rubrics(env.rubric):
        if any(map(getattr(rubric, "_is_group_func", lambda _: False), rubric.funcs)):
            return "its rubric compares the episodes of a group, which is not supported"
    return ""


def _rubrics(rubric: Any) -> list[Any]:
    """Return a rubric, or the rubrics of a group of them, that have functions."""
    inner = getattr(rubric, "rubrics", None)
    if inner:
        return [each for one in inner for each in _rubrics(one)]
    return [rubric] if getattr(rubric, "funcs", None) else []


def _noted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a reward function so that what it raises is noted, beside what verifiers makes of it. The wrapper asks for
    the state too, by which the episode is found."""
    signature = inspect.signature(function)
    takes_state = "state" in signature.parameters or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values()
    )

    @functools.wraps(function)
    async def call(*args: Any, **named: Any) -> Any:
        state = named.get("state")
        given = named if takes_state else {name: value for name, value in named.items() if name != "state"}
        try:
            return await _value(function(*args, **given))
        except Exception as error:
            _failures.get(id(state), []).append(error)
            raise

    if not takes_state:
        extra = inspect.Parameter("state", inspect.Parameter.KEYWORD_ONLY)
        call.__signature__ = signature.replace(parameters=[*signature.parameters.values(), extra])  # type: ignore[attr-defined]
    return call


def _rows(env: Any, name: str) -> Any:
    """Return the rows of one of the environment's datasets; None if it has none."""
    build = getattr(env, f"build_{name}", None)
    rows = build() if callable(build) else getattr(env, name, None)
    return rows if rows is not None and len(rows) else None


def _system_of(row: Mapping[str, Any]) -> str:
    prompt = row.get("prompt")
    if not isinstance(prompt, list) or not prompt:
        raise ValueError(f"a row's prompt is {in_words(prompt)}, not a list of messages")
    content = prompt[0].get("content") if prompt[0].get("role") == "system" else ""
    return content if isinstance(content, str) else ""


def _role(message: Any) -> str:
    return str(message["role"] if isinstance(message, Mapping) else message.role)


def _message(message: Any) -> dict[str, Any]:
    """Return a chat message of verifiers' as one of Pronk's. Raise ValueError for content that is not supported."""
    content = message["content"] if isinstance(message, Mapping) else message.content
    if isinstance(content, str) or content is None:
        return {"role": _role(message), "content": content or ""}
    parts: list[dict[str, Any]] = []
    for part in content:
        part = part if isinstance(part, Mapping) else part.model_dump()
        if part.get("type") == "text":
            parts.append({"type": "text", "text": part["text"]})
        elif part.get("type") == "image_url":
            parts.append({"type": "image", "image": _image(part["image_url"])})
        else:
            raise ValueError(f"content of type {part.get('type')!r}, which is not supported")
    return {"role": _role(message), "content": parts}


def _image(value: Any) -> PILImage.Image:
    url = value.get("url", "") if isinstance(value, Mapping) else str(value)
    head, comma, data = url.partition(",")
    if not head.startswith("data:image/") or not head.endswith(";base64") or not comma:
        raise ValueError(f"an image at {url[:60]!r}: only data URIs are supported")
    try:
        return open_image(base64.b64decode(data, validate=True))
    except ValueError as error:
        raise ValueError(f"an image that cannot be read: {error}") from None


def _no_client() -> Any:
    """Return what stands for the client of a model where the library asks for one by its type."""
    try:
        from verifiers.clients import Client  # of the library; 0.3 has it as verifiers.legacy.clients too
    except ImportError:
        return None
    stand_in = type("NoClient", (Client,), dict.fromkeys(getattr(Client, "__abstractmethods__", ()), _asked))
    return object.__new__(stand_in)


async def _asked(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("envs.verifiers has no model for the environment: only the policy's turns are played")


async def _value(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result
