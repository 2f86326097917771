"""Plays an environment that is written for VAGEN, unchanged.

    [env]
    module = "envs.vagen"
    args = {env = "vagen.envs.frozenlake.frozenlake_env.FrozenLake", config = {render_mode = "vision"}}

`env` names a class of VAGEN's GymImageEnv kind (it need not derive from it), by its dotted path or as my_env.py:Class:

    Class(config)
    system_prompt() -> {"obs_str": text}
    reset(seed) -> (observation, info)
    step(answer) -> (observation, reward, done, info)
    close()

Each may be async. An observation is {"obs_str": text, "multi_modal_input": {"<image>": [PIL images]}}; each "<image>"
in the text is replaced by the next image. `info["success"]` and `info["metrics"]` are the metrics.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec
from pydantic import Field

from envs.base import Env, Info, Observation, metadata_of
from envs.env_loops import EnvLoop
from envs.env_settings import EnvSettings, read_settings
from envs.loader import load_function
from shared.util.user_errors import describe, in_words

IMAGES = (
    "multi_modal_input",
    "multi_modal_data",
)  # where VAGEN's present and its former environments have their images
METHODS = ("reset", "step", "system_prompt")
MAX_SEED = 2**31


class VagenSettings(EnvSettings):
    env: str = Field(..., min_length=1, description="the class: package.module.Class or my_env.py:Class")
    config: dict[str, Any] = Field(default_factory=dict, description="its only argument")


SETTINGS = VagenSettings


def system_prompt(args: Any = None) -> str:
    """Return the class's system prompt. Raise ValueError for one that holds images."""
    settings = read_settings(VagenSettings, None, args)
    return _prompt(settings.env, msgspec.json.encode(settings.config))


def build_env(sample: Any = None, args: Any = None, **_: Any) -> VagenEnv:
    """Return the environment of a sample, whose seed `reset` gets. Raise ValueError for a class that is missing, or
    lacks a method."""
    settings = read_settings(VagenSettings, sample, args)
    metadata = metadata_of(sample)
    config = metadata.get("env_config") or {}
    seed = int(metadata.get("seed", config.get("seed", metadata.get("row", 0))))
    return VagenEnv(_made(settings), seed % MAX_SEED)


class VagenEnv(Env):
    """One episode of such an environment."""

    def __init__(self, env: Any, seed: int) -> None:
        self.env, self.seed = env, seed

    async def reset(self) -> tuple[Observation, Info]:  # type: ignore[override]
        result = await _value(self.env.reset(seed=self.seed))
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(f"reset of {self._name} returned {in_words(result)}, not (observation, info)")
        return self._checked(result[0]), {"metrics": _metrics(result[1])}

    async def step(self, response_text: str) -> tuple[Observation, bool, Info]:  # type: ignore[override]
        result = await _value(self.env.step(response_text))
        if not isinstance(result, tuple) or len(result) not in (4, 5):
            raise TypeError(f"step of {self._name} returned {in_words(result)}, not (observation, reward, done, info)")
        observation, reward, *done, info = result
        info = dict(info) if isinstance(info, Mapping) else {}
        info |= {"reward": reward, "metrics": _metrics(info)}
        return self._checked(observation), any(map(bool, done)), info

    def format_observation(self, observation: Observation) -> dict[str, Any]:
        """Return a message with each image where the text has its place."""
        images = observation["multi_modal_data"]["image"]
        pieces = observation["obs_str"].split("<image>")
        if len(pieces) != len(images) + 1:
            raise ValueError(
                f"an observation of {self._name} has {len(images)} images and {len(pieces) - 1} places '<image>' in "
                "its text"
            )
        content: list[dict[str, Any]] = []
        for index, piece in enumerate(pieces):
            content += [{"type": "image", "image": images[index - 1]}] if index else []
            content += [{"type": "text", "text": piece}] if piece else []
        return {"role": "user", "content": content or ""}

    async def close(self) -> None:  # type: ignore[override]
        if callable(close := getattr(self.env, "close", None)):
            await _value(close())

    @property
    def _name(self) -> str:
        return type(self.env).__name__

    def _checked(self, observation: Any) -> Observation:
        """Return an observation in the form of `envs.base`. Raise TypeError for one of another form."""
        if not isinstance(observation, Mapping) or not isinstance(observation.get("obs_str"), str):
            raise TypeError(
                f"an observation of {self._name} is {in_words(observation)}, not a dict with a text at 'obs_str'"
            )
        groups: Any = next((observation[name] for name in IMAGES if observation.get(name)), {})
        if (
            not isinstance(groups, Mapping)
            or set(groups) - {"<image>"}
            or not isinstance(groups.get("<image>", []), list | tuple)
        ):
            raise TypeError(f"images of {self._name} are {in_words(groups)}, not {{'<image>': [image]}}")
        images = {"multi_modal_data": {"image": list(groups.get("<image>", []))}}
        return {"obs_str": observation["obs_str"]} | images


async def _value(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


def _metrics(info: Any) -> dict[str, Any]:
    if not isinstance(info, Mapping):
        return {}
    metrics = info.get("metrics")
    found = dict(metrics) if isinstance(metrics, Mapping) else {}
    return found | ({"success": info["success"]} if "success" in info else {})


def _made(settings: VagenSettings) -> Any:
    kind = load_function(settings.env)
    if missing := [name for name in METHODS if not callable(getattr(kind, name, None))]:
        raise ValueError(f"env = {settings.env!r} has no method {missing[0]}: VAGEN's have {', '.join(METHODS)}")
    try:
        return kind(dict(settings.config))
    except (Exception, SystemExit) as error:
        raise ValueError(f"{settings.env}({settings.config}) raised {describe(error)}") from error


@cache
def _prompt(path: str, config: bytes) -> str:
    env = VagenEnv(_made(VagenSettings(env=path, config=msgspec.json.decode(config))), 0)

    async def ask() -> Any:
        return await _value(env.env.system_prompt())

    loop = EnvLoop()
    try:
        prompt = loop.run(ask())
        loop.run(env.close())
    finally:
        loop.close()
    if isinstance(prompt, Mapping):
        if any(prompt.get(name) for name in IMAGES):
            raise ValueError(f"the system prompt of {path} has images, which are not supported")
        prompt = prompt.get("obs_str")
    if not isinstance(prompt, str):
        raise ValueError(f"the system prompt of {path} is {in_words(prompt)}, not a text")
    return prompt
