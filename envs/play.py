"""Be the policy: play an environment by hand in a terminal.

    python -m envs.play envs.sokoban --seed 3
    python -m envs.play envs.sokoban --seed 3 --env.args.render_mode text --env.args.grid_size [7,7]
    python -m envs.play envs.sokoban --env.args '{"render_mode": "text"}'
    python -m envs.play envs.geo3k_multi_turn --data problems.jsonl --row 0

What is typed is the model's answer; \\n in it is a line break. An empty line or end of input stops.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # started by its path, from anywhere
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import json
import os
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from PIL import Image

from envs.base import total_turn_reward
from envs.datasets import load_dataset, with_images
from envs.env_calls import check_methods, close_env, make_env, messages_of, reset_env, reward_of, step_env
from envs.loader import check_settings, grades_mathematics, load_env, load_module, system_prompt, tool_schemas
from shared.config.data_section import checked_columns
from shared.rgb_images import to_rgb
from shared.types import Sample
from shared.util.dotted_options import with_json_options
from shared.util.own_commands import command
from shared.util.user_errors import describe, trace_of


def main(argv: list[str] | None = None) -> int:
    options = parse(parser(__doc__), argv)
    try:
        started = start(options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        play(options, *started)
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (Exception, SystemExit) as error:  # noqa: BLE001  any exception here is the environment's mistake
        print(trace_of(error), file=sys.stderr)
        hint = f"{command('check')} {options.module} says what an environment must keep"
        print(f"error: {options.module} raised {describe(error)}; {hint}", file=sys.stderr)
        return 2
    return 0


def play(options: argparse.Namespace, module: ModuleType, env: Any, messages: list[dict[str, Any]]) -> None:
    """Play an episode with typed answers."""
    for message in messages:
        show(message, options.images, "prompt")
    observation, _ = reset_env(env)
    if observation:
        show_all(messages_of(env, observation), options.images, "turn0")
    infos: list[dict[str, Any]] = []
    for turn in range(1, options.max_turns + 1):
        answer = read_answer()
        if not answer:
            break
        observation, done, info = step_env(env, answer)
        infos.append(info)
        if observation:
            show_all(messages_of(env, observation), options.images, f"turn{turn}")
        print(f"reward {info.get('reward', 0.0):g}  metrics {json.dumps(info.get('metrics', {}), default=str)}")
        if done:
            break
    final = reward_of(module.episode_reward, env) if hasattr(module, "episode_reward") else total_turn_reward(infos)
    print(f"episode over: {len(infos)} turns, reward {final:.4f}")
    close_env(env)


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that `envs.play`, `envs.show` and `envs.check` share."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("module", nargs="?", default="envs.sokoban", help="dotted path or .py file with build_env")
    options.add_argument("--seed", type=int, default=0, help="the sample's seed")
    options.add_argument("--data", help="a .parquet or .jsonl file; its row is the sample")
    options.add_argument("--row", type=int, default=0, help="row of --data")
    add_object_option(options, "data.columns", "columns of --data by their meaning, as a run takes them")
    add_object_option(options, "env.args", "settings of the environment, as a run takes them")
    options.add_argument(
        "--env.max_turns", "--max-turns", dest="max_turns", type=int, default=8, help="turns of the episode"
    )
    options.add_argument("--pictures", dest="images", type=Path, help="folder to write each image to as PNG")
    return options


OBJECTS = ("env.args", "data.columns")  # options that are JSON objects, given whole or entry by entry


def add_object_option(options: argparse.ArgumentParser, name: str, told: str) -> None:
    """Add an option of OBJECTS. `told`: its help."""
    flags = (f"--{name}", f"--{name}.NAME")
    options.add_argument(*flags, dest=name, action="append", default=[], metavar="JSON", help=told)


def parse(options: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line with the recipe's grammar for OBJECTS."""
    return options.parse_args(with_json_options(sys.argv[1:] if argv is None else argv, OBJECTS))


def object_of(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """Return the value of an option of OBJECTS. Raise ValueError if it is no JSON object."""
    found: dict[str, Any] = {}
    for given in getattr(options, name):
        try:
            values = json.loads(given)
        except json.JSONDecodeError as error:
            raise ValueError(f"--{name} {given!r} is not JSON: {error}") from None
        if not isinstance(values, dict):
            raise ValueError(f"--{name} {given!r}: write it like '{{\"name\": 1}}', or --{name}.name 1")
        found |= values
    return found


def start(options: argparse.Namespace) -> tuple[ModuleType, Any, list[dict[str, Any]]]:
    """Return the module, the environment and the messages before the first observation. Raise ValueError for a mistake
    of the user's."""
    args = settings(options)
    module, build_env = load_module(options.module), load_env(options.module)
    check_settings(module, args, "--env.args")
    prompt, tools = system_prompt(module, args), tool_schemas(module, args)
    if options.data:
        columns = checked_columns(object_of(options, "data.columns"), "--data.columns")
        is_mathematics = grades_mathematics(module)
        samples = load_dataset(
            options.data, system_prompt=prompt, tools=tools, columns=columns, is_mathematics=is_mathematics
        ).samples
        if not 0 <= options.row < len(samples):
            raise ValueError(f"--row {options.row} is not in {options.data}: it has rows 0 to {len(samples) - 1}")
        sample = samples[options.row]
    else:
        first = ({"role": "system", "content": prompt},) if prompt else ()
        sample = Sample(id=str(options.seed), prompt=first, metadata={"seed": options.seed}, tools=tools)
    messages = with_images(sample)
    told = [{"role": "tools", "content": "\n".join(map(json.dumps, tools))}] if tools else []
    return module, build(build_env, sample, args), [*told, *messages]


def build(build_env: Callable[..., Any], sample: Sample, args: dict[str, Any]) -> Any:
    """Return the environment. Raise ValueError if `build_env` fails, or returns an object that is not an
    environment."""
    try:
        env = make_env(build_env, sample=sample, args=args)
    except (Exception, SystemExit) as error:
        raise ValueError(f"build_env raised {describe(error)}") from error
    check_methods(env)
    return env


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings for the environment. Raise ValueError for `--env.args` that is no JSON object."""
    return {"max_turns": options.max_turns} | object_of(options, "env.args")


def show_all(messages: list[dict[str, Any]], folder: Path | None, name: str) -> None:
    """Print an observation's messages; the pictures of several have names of their own."""
    for number, message in enumerate(messages):
        show(message, folder, f"{name}_{number}" if len(messages) > 1 else name)


def show(message: dict[str, Any], folder: Path | None, name: str) -> None:
    """Print a chat message, with images as coloured blocks (on a terminal); also write them as files if a folder is
    given."""
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    print(f"--- {message['role']}")
    for index, part in enumerate(parts):
        if part["type"] == "text":
            print(part["text"])
            continue
        image = to_rgb(part["image"])
        print(f"[image {image.width}x{image.height}]")
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            image.save(folder / f"{name}_{index}.png")
        if sys.stdout.isatty() or os.environ.get("FORCE_COLOR"):
            print(blocks(image))


def blocks(image: Image.Image) -> str:
    """Return the image in half-block characters with 24-bit colours, at most 48 characters wide."""
    width = min(48, image.width)
    height = max(2, round(image.height * width / image.width) // 2 * 2)
    small = image.resize((width, height), Image.Resampling.BOX)
    lines = []
    for y in range(0, height, 2):
        line = ""
        for x in range(width):
            (r, g, b), (r2, g2, b2) = small.getpixel((x, y)), small.getpixel((x, y + 1))  # type: ignore[misc]
            line += f"\x1b[38;2;{r};{g};{b}m\x1b[48;2;{r2};{g2};{b2}m▀"
        lines.append(line + "\x1b[0m")
    return "\n".join(lines)


def read_answer() -> str:
    try:
        return input("> ").replace("\\n", "\n")
    except EOFError:
        return ""


if __name__ == "__main__":
    sys.exit(main())
