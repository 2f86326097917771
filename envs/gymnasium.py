"""Plays an environment of gymnasium: frames become images, words become actions.

    [env]
    module = "envs.gymnasium"
    args = {id = "FrozenLake-v1", kwargs = {is_slippery = false}, actions_per_turn = 3}

gymnasium is an extra: `pip install 'gymnasium[toy-text]'`. An id may name the module that registers it, as gymnasium
writes it, "my_module:Lake-v0", or its file: "my_lake.py:Lake-v0".
"""

from __future__ import annotations

import os
import re
import string
import threading
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

import numpy as np
from PIL import Image
from pydantic import Field, field_validator, model_validator

from envs.action_words import ActionWords, action_words
from envs.base import Env, Info, Observation, metadata_of
from envs.env_settings import EnvSettings, read_settings
from envs.loader import load_module
from shared.util.user_errors import in_words, text_of

INSTALL = "pip install 'gymnasium[toy-text]'"
MAX_SEED = 2**31
MAX_KNOWN = 256  # settings whose facts are remembered: samples may bring their own
MAX_TOLD = 256  # numbers of an observation that are told in text
SUCCESS_NAMES = ("success", "is_success")  # in the info of the last step
FIELDS = ("observation", "step", "actions")  # of `text`
_first_frame = threading.Lock()
_drawn: set[str] = set()  # ids of which a frame has been drawn in this process
_COLOURED = re.compile(r"\x1b\[([\d;]+)m(.*?)\x1b\[0?m", re.DOTALL)
_ESCAPE = re.compile(r"\x1b\[[\d;]*[A-Za-z]")
_COLOURS = ("gray", "red", "green", "yellow", "blue", "magenta", "cyan", "white")


class GymnasiumSettings(EnvSettings):  # type: ignore[no-redef]  # pydantic's plugin gives __init__ a **kwargs too
    id: str = Field(..., min_length=1, description='"FrozenLake-v1", "my_module:Lake-v0" or "my_lake.py:Lake-v0"')
    kwargs: dict[str, Any] = Field(default_factory=dict, description="arguments of the environment, for gymnasium.make")
    render: Literal["auto", "image", "text", "observation"] = Field(
        "auto",
        description="what the model sees: image (render mode rgb_array), text (ansi), or the observation itself; auto: "
        "the first of these that there is",
    )
    image_size: tuple[int, int] | None = Field(None, description="width and height of images; absent: as drawn")
    text: str = Field(
        "Your next action?", description="text of each turn; {observation}, {step} and {actions} are filled in"
    )
    actions: list[str] | list[list[str]] | dict[str, Any] | None = Field(
        None,
        description="words for the actions: a list for Discrete, a list of lists for MultiDiscrete, or {word = action} "
        "for any space; absent: the usual words, numbers where there are none",
    )
    pattern: str = Field(
        "",
        description="regular expression; each of its matches (its first group) is a word; absent: all that stands in "
        "<answer>…</answer>, or after the thoughts",
    )
    actions_per_turn: int = Field(1, ge=1, description="actions of one answer; further ones are ignored")
    max_steps: int | None = Field(None, ge=1, description="steps of an episode; absent: as registered")
    solved_return: float | None = Field(
        None,
        description="return from which an episode counts as success; absent: info['success'] or ['is_success'], else "
        "the registered reward_threshold, else a positive reward at the step that terminates",
    )
    invalid_reward: float = Field(0.0, description="reward of an answer that names no action; nothing moves then")

    @field_validator("pattern")
    @classmethod
    def _is_a_pattern(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"no regular expression: {error}") from None
        return value

    @model_validator(mode="after")
    def _fits(self) -> GymnasiumSettings:
        try:
            named = {name for _, name, _, _ in string.Formatter().parse(self.text) if name is not None}
        except ValueError as error:
            raise ValueError(f"text = {self.text!r}: {error}; write {{{{ and }}}} for braces") from None
        if unknown := named - set(FIELDS):
            raise ValueError(f"text = {self.text!r}: no field {sorted(unknown)[0]!r}; it has {', '.join(FIELDS)}")
        if "render_mode" in self.kwargs:
            raise ValueError("kwargs: leave render_mode out, and set render = 'image' or 'text'")
        if self.image_size is not None and min(self.image_size) < 1:
            raise ValueError(f"image_size = {list(self.image_size)}: give width and height in pixels")
        facts_of(self)
        return self


SETTINGS = GymnasiumSettings


def system_prompt(args: Any = None) -> str:
    """Return a system prompt that names the actions."""
    settings = read_settings(GymnasiumSettings, None, args)
    facts = facts_of(settings)
    words, rng, most = facts.words, Random(0), settings.actions_per_turn
    sees = "an image" if facts.shows_images else "a text"
    many = f"up to {most} actions, each " if most > 1 else ""
    example = ", ".join(words.example(rng) for _ in range(min(2, most)))
    name = settings.id.rpartition(":")[2]
    return (
        f"You play {name}. Each turn shows {sees}. Answer with {many}{words.hint()}. Write your answer like this: "
        f"<answer>{example}</answer>"
    )


def build_env(sample: Any = None, args: Any = None, **_: Any) -> GymnasiumEnv:
    """Return the environment of a sample, whose seed is the environment's. Raise ValueError, in one line, for an id
    that gymnasium does not know and for what does not fit the environment."""
    settings = read_settings(GymnasiumSettings, sample, args)
    metadata = metadata_of(sample)
    config = metadata.get("env_config") or {}
    seed = int(metadata.get("seed", config.get("seed", metadata.get("row", 0))))
    facts = facts_of(settings)
    return GymnasiumEnv(_make(settings, facts.mode), seed % MAX_SEED, settings, facts)


@dataclass(frozen=True, slots=True)
class EnvFacts:
    """What an environment is like: its render mode (None: the observation is shown), its actions' words, and the return
    from which it counts as solved."""

    mode: str | None
    shows_images: bool
    words: ActionWords
    threshold: float | None


_known: dict[str, EnvFacts] = {}  # by the settings as JSON


def facts_of(settings: GymnasiumSettings) -> EnvFacts:
    """Return what the environment is like, of which one is made for this. Raise ValueError, in one line, if there is
    none, or if the settings do not fit it."""
    key = settings.model_dump_json()
    if (facts := _known.get(key)) is None:
        facts = _look(settings)
        if len(_known) >= MAX_KNOWN:
            _known.clear()
        _known[key] = facts
    return facts


def _look(settings: GymnasiumSettings) -> EnvFacts:
    env = _make(settings, None)
    try:
        modes = (env.unwrapped.metadata or {}).get("render_modes") or ()
        wanted = {"image": ["rgb_array"], "text": ["ansi"], "observation": []}.get(
            settings.render, [] if _is_image(env.observation_space) else ["rgb_array", "ansi"]
        )
        mode = next((each for each in wanted if each in modes), None)
        if mode is None and settings.render in ("image", "text"):
            raise ValueError(
                f"render = {settings.render!r}: {settings.id} has no render mode {wanted[0]!r}, only "
                f"{', '.join(modes) or 'none'}; set render = 'observation', or leave it out"
            )
        name = env.spec.name if env.spec is not None else ""
        meanings = getattr(env.unwrapped, "get_action_meanings", None)
        words = action_words(env.action_space, settings.actions, name, meanings() if callable(meanings) else None)
        shows_images = mode == "rgb_array" or (mode is None and _is_image(env.observation_space))
        return EnvFacts(mode, shows_images, words, env.spec.reward_threshold if env.spec is not None else None)
    finally:
        env.close()


def _make(settings: GymnasiumSettings, mode: str | None) -> Any:
    """Return gymnasium's environment. Raise ValueError, in one line, if there is none."""
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # frames are drawn into memory
    os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    try:
        import gymnasium
    except ImportError as error:
        raise ValueError(f"envs.gymnasium needs gymnasium, which is not installed: {INSTALL} ({error})") from None
    module, _, name = settings.id.rpartition(":")
    if module.endswith(".py"):
        load_module(module, f"gymnasium.register(id={name!r}, …)")
    else:
        name = settings.id
    limit = {} if settings.max_steps is None else {"max_episode_steps": settings.max_steps}
    shown = {} if mode is None else {"render_mode": mode}
    try:
        return gymnasium.make(name, disable_env_checker=True, **shown, **limit, **settings.kwargs)
    except gymnasium.error.DependencyNotInstalled as error:
        raise ValueError(f"id = {settings.id!r}: {text_of(error)}") from error
    except (gymnasium.error.Error, ImportError) as error:
        raise ValueError(f"id = {settings.id!r}: gymnasium says: {text_of(error)}") from error
    except TypeError as error:
        given = f", with kwargs = {settings.kwargs}" if settings.kwargs else ""
        raise ValueError(f"id = {settings.id!r} cannot be made{given}: {text_of(error)}") from error


class GymnasiumEnv(Env):
    """One episode of a gymnasium environment."""

    def __init__(self, env: Any, seed: int, settings: GymnasiumSettings, facts: EnvFacts) -> None:
        self.env, self.seed, self.settings, self.facts, self.words = env, seed, settings, facts, facts.words
        self._threshold = facts.threshold if settings.solved_return is None else settings.solved_return
        self._observation: Any = None
        self.num_steps, self.total = 0, 0.0
        self.success = False

    def reset(self) -> tuple[Observation, Info]:
        result = self.env.reset(seed=self.seed)
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(f"reset of {self.settings.id} returned {in_words(result)}, not (observation, info)")
        self._observation = result[0]
        self.num_steps, self.total, self.success = 0, 0.0, False
        return self._shown(""), {"metrics": self._metrics()}

    def step(self, response_text: str) -> tuple[Observation, bool, Info]:
        settings = self.settings
        try:
            actions = self.words.actions(response_text, settings.pattern, settings.actions_per_turn)
        except ValueError as mistake:
            metrics = self._metrics() | {"turn_metrics": {"action_is_valid": False}}
            told = f"{mistake} Answer with {self.words.hint()}.\n"
            return self._shown(told), False, {"reward": settings.invalid_reward, "metrics": metrics}
        gained, terminated, truncated = 0.0, False, False
        for action in actions:
            self._observation, reward, terminated, truncated, info = self._stepped(action)
            self.num_steps += 1
            gained += float(reward)
            if terminated or truncated:
                self.success = self._succeeded(self.total + gained, float(reward), bool(terminated), info)
                break
        self.total += gained
        over = bool(terminated or truncated)
        metrics = self._metrics() | {"turn_metrics": {"action_is_valid": True}}
        metrics["truncated"] = bool(truncated and not terminated)
        return self._shown("") if not over else {}, over, {"reward": gained, "metrics": metrics}

    def close(self) -> None:
        self.env.close()

    def random_response(self, rng: Random) -> str:
        """Return an answer like that of a policy that knows only the format."""
        count = rng.randint(1, self.settings.actions_per_turn)
        return f"<answer>{', '.join(self.words.example(rng) for _ in range(count))}</answer>"

    def _stepped(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        why = f"step of {self.settings.id} does not return (observation, reward, terminated, truncated, info)"
        try:
            result = self.env.step(action)
        except ValueError as error:  # raised by a wrapper of gymnasium's
            if "values to unpack (expected 5" not in str(error):
                raise
            raise TypeError(f"{why}: {error}; Gym's old form has four values") from None
        if not isinstance(result, tuple) or len(result) != 5:
            raise TypeError(f"{why}, but {in_words(result)}")
        return result

    def _succeeded(self, total: float, reward: float, terminated: bool, info: Any) -> bool:
        if self.settings.solved_return is None and isinstance(info, dict):
            for name in SUCCESS_NAMES:
                if name in info:
                    return bool(info[name])
        return total >= self._threshold if self._threshold is not None else terminated and reward > 0

    def _metrics(self) -> dict[str, Any]:
        return {"success": self.success, "steps": self.num_steps, "truncated": False}

    def _shown(self, note: str) -> Observation:
        """Return what the model sees, with a note before the turn's text."""
        mode, images = self.facts.mode, self.facts.shows_images
        frame = self._frame()
        fields = {
            "observation": in_text(self._observation) if "{observation" in self.settings.text else "",
            "step": self.num_steps,
            "actions": self.words.hint(),
        }
        ask = note + self.settings.text.format(**fields)
        if mode == "ansi":
            return {"obs_str": f"{plain_text(frame, self.settings.id)}\n{ask}"}
        if not images:
            return {"obs_str": f"{in_text(frame)}\n{ask}"}
        image = as_image(frame, self.settings.id)
        if self.settings.image_size is not None:
            image = image.resize(self.settings.image_size, Image.Resampling.BOX)
        return {"obs_str": ask, "multi_modal_data": {"image": [image]}}

    def _frame(self) -> Any:
        """Return what is shown as it is drawn. The first frame is drawn alone: pygame imports its parts then, and
        another thread would find them half imported."""
        if self.facts.mode is None:
            return self._observation
        if self.settings.id in _drawn:
            return self.env.render()
        with _first_frame:
            frame = self.env.render()
        _drawn.add(self.settings.id)
        return frame


def as_image(frame: Any, name: str) -> Image.Image:
    """Return a frame as an image. Raise TypeError for one of another type than (height, width[, 3]) of uint8."""
    if isinstance(frame, Image.Image):
        return frame
    if not _is_picture(frame):
        raise TypeError(
            f"a frame of {name} is {_form(frame)}, not an array (height, width, 3) of uint8: set render = 'text' or "
            "'observation', or wrap the environment so that render() returns such an array"
        )
    return Image.fromarray(np.ascontiguousarray(frame[..., 0] if frame.ndim == 3 and frame.shape[2] == 1 else frame))


def plain_text(frame: Any, name: str) -> str:
    """Return a frame of the render mode ansi without control codes: what stands on a colour is put in brackets, what
    has a colour gets its name. Raise TypeError for a frame that is no text."""
    if hasattr(frame, "getvalue"):
        frame = frame.getvalue()
    if not isinstance(frame, str):
        raise TypeError(f"a frame of {name} is {_form(frame)}, not a text: set render = 'image' or 'observation'")

    def marked(match: re.Match[str]) -> str:
        codes = [int(code) for code in match[1].split(";") if code]
        if any(40 <= code <= 47 or 100 <= code <= 107 for code in codes):
            return f"[{match[2]}]"
        colour = next((_COLOURS[code % 10] for code in codes if 30 <= code <= 37 or 90 <= code <= 97), "")
        return f"{match[2]}({colour})" if colour else match[2]

    return _ESCAPE.sub("", _COLOURED.sub(marked, frame)).strip("\n")


def in_text(observation: Any) -> str:
    """Return an observation in words: numbers rounded to four digits, a dict a line for each name. Raise TypeError for
    one that text cannot tell."""
    if isinstance(observation, dict):
        return "\n".join(f"{name}: {in_text(value)}" for name, value in observation.items())
    if isinstance(observation, str):
        return observation
    if isinstance(observation, tuple | list):
        return ", ".join(map(in_text, observation))
    values = np.asarray(observation)
    if values.dtype.kind not in "biuf" or values.size > MAX_TOLD:
        raise TypeError(
            f"an observation is {_form(observation)}, which text cannot tell (at most {MAX_TOLD} numbers): set "
            "render = 'image', or wrap the environment"
        )
    if values.ndim < 2:
        return ", ".join(f"{value:.4g}" for value in values.ravel().tolist())
    return "\n".join(" ".join(f"{value:.4g}" for value in row.ravel().tolist()) for row in values)


def _is_picture(value: Any) -> bool:
    return (
        isinstance(value, np.ndarray)
        and value.dtype == np.uint8
        and (value.ndim == 2 or (value.ndim == 3 and value.shape[2] in (1, 3, 4)))
        and value.size > 0
    ) or isinstance(value, Image.Image)


def _is_image(space: Any) -> bool:
    """Tell whether the observations of a space are images of at least 16 pixels a side."""
    shape: tuple[int, ...] = getattr(space, "shape", None) or ()
    return getattr(space, "dtype", None) == np.uint8 and len(shape) == 3 and shape[2] in (1, 3) and min(shape[:2]) >= 16


def _form(value: Any) -> str:
    return f"an array {value.shape} of {value.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
