"""Run an environment against the contract of `envs.base` and say, in words, what is wrong with it.

    python -m envs.check my_env.py
    python -m envs.check envs.sokoban --seed 3 --env.args.render_mode text

From another folder it is `python PATH/TO/envs/check.py my_env.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # started by its path, from anywhere
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from PIL import Image

from envs.env_calls import (
    NAME_CHARACTERS,
    CallHung,
    call_within,
    check_methods,
    close_env,
    images_of,
    is_metric_name,
    is_number,
    make_env,
    messages_of,
    reset_env,
    responder,
    reward_of,
    step_env,
)
from envs.loader import check_settings, load_env, load_module, system_prompt
from envs.play import parse, parser, settings
from shared.rgb_images import as_png
from shared.types import Sample
from shared.util.user_errors import describe, in_words, text_of, trace_of

MAX_TEXT, MAX_PIXELS, MAX_IMAGES = 50_000, 4_194_304, 16
ANSWERS = ("", "hello", "<answer>up, left</answer>", "\\boxed{60}", "上" * 50, "x" * 20_000, "\x00\ufffd<|im_end|>")


@dataclass(slots=True)
class Check:
    """The result of a check. `problems` break the contract, `notes` are worth knowing; `traces` are the tracebacks of
    what the environment raised."""

    limit_s: float = 30.0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    traces: list[str] = field(default_factory=list)

    def problem(self, text: str) -> None:
        if text not in self.problems:
            self.problems.append(text)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def attempt(self, what: str, function: Callable[[], Any]) -> Any:
        """Return the result of a call; None, after noting a problem, if it raises an exception or does not return."""
        try:
            return call_within(self.limit_s, what, function)
        except CallHung as error:
            self.problem(str(error))
        except (Exception, SystemExit) as error:  # noqa: BLE001  any exception of the environment is reported
            self.report(what, error)
        return None

    def report(self, what: str, error: BaseException) -> None:
        """Note the problem that a call raised an exception. One without frames of the user's says all in its words."""
        trace = trace_of(error)
        self.problem(f"{what} raised {describe(error)}" if trace else text_of(error))
        if trace and trace not in self.traces:
            self.traces.append(trace)


def check_env(path: str, args: Mapping[str, Any] | None = None, seed: int = 0, limit_s: float = 30.0) -> Check:
    """Check the environment at `path` with samples of two seeds."""
    check = Check(limit_s)
    args = {"max_turns": 8, **(args or {})}
    try:
        module, build_env = load_module(path), load_env(path)
        check_settings(module, args, "--env.args")
        if not system_prompt(module, args):
            check.notes.append("there is no SYSTEM_PROMPT: the model is told nothing before the first observation")
    except ValueError as error:
        check.problem(" ".join(str(error).split()))
        return check
    if hasattr(module, "episode_reward") and not callable(module.episode_reward):
        check.problem("episode_reward is not a function")
    records = [_episode(check, module, build_env, args, number) for number in (seed, seed, seed + 1)]
    if any(record.is_broken_off for record in records):
        return check
    if records[0] != records[1]:
        check.problem("two episodes of the same sample with the same answers differ: draw from Random(seed) only")
    if records[0] == records[2]:
        check.notes.append("samples with other seeds give the same episode: is metadata['seed'] used?")
    if not any(record.has_reward for record in records) and not hasattr(module, "episode_reward"):
        named = sorted({name for record in records for name in record.info_names} - {"reward", "metrics"})
        holds = f"; info has {', '.join(named)}" if named else ""
        check.notes.append(f"no step gave info['reward'], and there is no episode_reward: every reward is 0{holds}")
    return check


@dataclass(slots=True)
class EpisodeRecord:
    """An episode's events, which must be the same when it is played again."""

    events: list[Any] = field(default_factory=list)
    is_broken_off: bool = field(default=False, compare=False)
    has_reward: bool = field(default=False, compare=False)
    info_names: set[str] = field(default_factory=set, compare=False)


def _episode(
    check: Check, module: Any, build_env: Callable[..., Any], args: Mapping[str, Any], seed: int
) -> EpisodeRecord:
    """Play an episode. What goes wrong in one part of it is a problem of the check; the other parts are played if they
    can be."""
    record = EpisodeRecord()
    sample = Sample(id=f"check-{seed}", metadata={"seed": seed})
    env = check.attempt("build_env", lambda: make_env(build_env, sample=sample, args=args))
    if env is None:
        if not check.problems:
            check.problem("build_env returned None, not an environment")
        record.is_broken_off = True
        return record
    try:
        check_methods(env)
        started = [check.attempt("reset", lambda: _reset(check, env)) for _ in range(2)]
        if None not in started and started[0] != started[1]:
            check.problem("a second reset() gives another observation: reset must start the same episode again")
        record.events.append(started[0])
        record.is_broken_off = None in started or not _turns(check, module, env, int(args["max_turns"]), seed, record)
        if not record.is_broken_off and callable(getattr(module, "episode_reward", None)):
            value = check.attempt("episode_reward", lambda: reward_of(module.episode_reward, env))
            if value is not None and not is_number(value):
                check.problem(f"episode_reward returned {in_words(value)}, not a finite number")
            record.events.append(value)
    except Exception as error:  # noqa: BLE001 - a user's object may raise anything when it is looked at
        check.report("the environment", error)
        record.is_broken_off = True
    check.attempt("close", lambda: close_env(env))
    return record


def _turns(check: Check, module: Any, env: Any, most: int, seed: int, record: EpisodeRecord) -> bool:
    """Play the turns of an episode; return False if one failed."""
    rng, respond = Random(seed), responder(module, env)
    for turn in range(most):
        answer = rng.choice(ANSWERS)
        if respond is not None and turn % 2:
            answer = respond(rng)
        result = check.attempt("step", partial(step_env, env, answer))
        if result is None:
            return False
        observation, done, info = result
        reward = _reward(check, info)
        record.has_reward |= "reward" in info
        record.info_names |= {str(name) for name in info}
        record.events.append((_seen(check, env, observation) if _is_shown(observation, done) else (), done, reward))
        if record.events[-1][0] is None:
            return False
        if done:
            break
    return True


def _is_shown(observation: Any, done: bool) -> bool:
    return not done or (isinstance(observation, dict) and bool(observation))


def _reset(check: Check, env: Any) -> Any:
    observation, info = reset_env(env)
    if not isinstance(info, dict):
        check.problem(f"reset returned an info of type {type(info).__name__}, not dict")
    return _seen(check, env, observation) if observation else ()


def _seen(check: Check, env: Any, observation: Any) -> Any:
    """Check an observation and the messages made of it, as an actor makes it; return its text and its images' bytes, or
    None if there is no message."""
    messages = check.attempt("format_observation", lambda: messages_of(env, observation))
    if messages is None:
        return None
    parts: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] not in ("user", "tool"):
            role = message["role"]
            check.problem(f"format_observation gives the role {role!r}; observations are the user's or a tool's")
        content = message["content"]
        own = [{"type": "text", "text": content}] if isinstance(content, str) else content
        kinds = [part["type"] for part in own]
        if kinds != sorted(kinds):
            check.note("a message has text before an image; most models learned with images first")
        parts += own
    text = "".join(part["text"] for part in parts if part["type"] == "text")
    if len(text) > MAX_TEXT:
        check.problem(f"an observation's text has {len(text)} characters; keep it under {MAX_TEXT}")
    shown: list[Any] = [part["image"] for part in parts if part["type"] == "image"]
    for image in shown:
        if not isinstance(image, Image.Image):
            check.problem(
                f"an image is {type(image).__name__}, not a PIL image: make it one, as PIL.Image.fromarray does of an "
                "array (height, width, 3) of uint8"
            )
            return None
        try:
            if not image.width * image.height:
                raise ValueError("it has no pixels")
            as_png(image)
        except Exception as error:  # noqa: BLE001 - Pillow raises exceptions of many types
            check.problem(f"an image cannot be shown: {text_of(error)}")
            return None
        if image.width * image.height > MAX_PIXELS:
            check.problem(f"an image of {image.width}x{image.height} has over {MAX_PIXELS} pixels: draw it smaller")
    if len(shown) > MAX_IMAGES:
        check.problem(f"an observation holds {len(shown)} images; keep it to {MAX_IMAGES}")
    if len(shown) != len(images_of(observation)):
        check.problem(f"the observation has {len(images_of(observation))} images, the message {len(shown)}")
    return text, tuple((image.mode, image.size, image.tobytes()) for image in shown)


def _reward(check: Check, info: dict[str, Any]) -> float:
    reward = info.get("reward", 0.0)
    if not is_number(reward):
        check.problem(f"info['reward'] is {in_words(reward)}, not a finite number")
        return 0.0
    metrics = info.get("metrics")
    _check_metrics(check, {} if metrics is None else metrics, depth=0)
    return float(reward)


def _check_metrics(check: Check, metrics: Any, depth: int) -> None:
    if not isinstance(metrics, Mapping) or depth > 1:
        check.problem(f"info['metrics'] is {in_words(metrics)}: use numbers, or one level of dicts of numbers")
        return
    for name, value in metrics.items():
        if not is_metric_name(name):
            check.problem(
                f"a metric's name is {in_words(name)}, not a printable text of at most {NAME_CHARACTERS} characters"
            )
        elif isinstance(value, Mapping):
            _check_metrics(check, value, depth + 1)
        elif not is_number(value):
            check.problem(f"the metric {name!r} is {in_words(value)}, not a finite number")


def main(argv: list[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--limit", type=float, default=30.0, help="seconds that one call may take")
    chosen = parse(options, argv)
    try:
        check = check_env(chosen.module, settings(chosen), chosen.seed, chosen.limit)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for trace in check.traces:
        print(trace)
    for text in check.problems:
        print(f"problem: {text}")
    for text in check.notes:
        print(f"note: {text}")
    if not check.problems:
        print(f"ok: {chosen.module} keeps the contract")
    return 1 if check.problems else 0


if __name__ == "__main__":
    sys.exit(main())
