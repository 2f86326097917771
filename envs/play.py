"""Be the policy: play an environment by hand in a terminal.

    python -m envs.play envs.sokoban --seed 3
    python -m envs.play envs.sokoban --seed 3 --set render_mode=text --set grid_size=[7,7]
    python -m envs.play envs.geo3k_multi_turn --data problems.jsonl --row 0

What is typed is the model's answer; \\n in it is a line break. An empty line or end of input stops.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from PIL import Image

from envs.base import total_turn_reward
from envs.datasets import load_dataset, with_images
from envs.loader import check_methods, check_settings, load_env, load_module, raised, system_prompt
from shared.types import Sample


def main(argv: list[str] | None = None) -> int:
    options = parser(__doc__).parse_args(argv)
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
    except (Exception, SystemExit) as error:  # noqa: BLE001  the environment's mistake
        cure = f"python -m envs.check {options.module} says what an environment must keep"
        print(f"error: {options.module} raised {raised(error)}; {cure}", file=sys.stderr)
        return 2
    return 0


def play(options: argparse.Namespace, module: ModuleType, env: Any, messages: list[dict[str, Any]]) -> None:
    """An episode with the answers that are typed."""
    for message in messages:
        show(message, options.images, "prompt")
    observation, _ = env.reset()
    if observation:
        show(env.format_observation(observation), options.images, "turn0")
    infos: list[dict[str, Any]] = []
    for turn in range(1, options.max_turns + 1):
        answer = read_answer()
        if not answer:
            break
        observation, done, info = env.step(answer)
        infos.append(info)
        show(env.format_observation(observation), options.images, f"turn{turn}")
        print(f"reward {info.get('reward', 0.0):g}  metrics {json.dumps(info.get('metrics', {}), default=str)}")
        if done:
            break
    final = module.episode_reward(env) if hasattr(module, "episode_reward") else total_turn_reward(infos)
    print(f"episode over: {len(infos)} turns, reward {final:.4f}")
    env.close()


def parser(description: str | None) -> argparse.ArgumentParser:
    """Options that playing by hand and drawing an episode share."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("module", nargs="?", default="envs.sokoban", help="dotted path or .py file with build_env")
    options.add_argument("--seed", type=int, default=0, help="the sample's seed")
    options.add_argument("--data", help="a .parquet or .jsonl file; its row is the sample")
    options.add_argument("--row", type=int, default=0, help="row of --data")
    options.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of env.args")
    options.add_argument("--max-turns", type=int, default=8, help="turns of the episode")
    options.add_argument("--pictures", dest="images", type=Path, help="folder to write each image to as PNG")
    return options


def start(options: argparse.Namespace) -> tuple[ModuleType, Any, list[dict[str, Any]]]:
    """The module, the environment and the messages before the first observation. ValueError on the user's mistakes."""
    args = settings(options)
    module, build_env = load_module(options.module), load_env(options.module)
    check_settings(module, args, "--set")
    prompt = system_prompt(module, args)
    if options.data:
        samples = load_dataset(options.data, system_prompt=prompt).samples
        if not 0 <= options.row < len(samples):
            raise ValueError(f"--row {options.row} is not in {options.data}: it has rows 0 to {len(samples) - 1}")
        sample = samples[options.row]
    else:
        first = ({"role": "system", "content": prompt},) if prompt else ()
        sample = Sample(id=str(options.seed), prompt=first, metadata={"seed": options.seed})
    return module, build(build_env, sample, args), with_images(sample)


def build(build_env: Callable[..., Any], sample: Sample, args: dict[str, Any]) -> Any:
    """The environment. ValueError if `build_env` fails or returns none."""
    try:
        env = build_env(sample=sample, args=args)
    except (ValueError, OSError):
        raise
    except (Exception, SystemExit) as error:
        raise ValueError(f"build_env raised {raised(error)}") from error
    check_methods(env)
    return env


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """What the environment is given."""
    return {"max_turns": options.max_turns} | values_of(options.set)


def values_of(items: Iterable[str]) -> dict[str, Any]:
    """The settings given with --set, their values read as JSON where they are JSON. ValueError for one without '='."""
    found: dict[str, Any] = {}
    for item in items:
        key, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"--set {item!r} has no '=': write --set key=value")
        try:
            found[key] = json.loads(value)
        except json.JSONDecodeError:
            found[key] = value
    return found


def show(message: dict[str, Any], folder: Path | None, name: str) -> None:
    """Print a chat message; images as coloured blocks (on a terminal) and as files (where asked for)."""
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    print(f"--- {message['role']}")
    for index, part in enumerate(parts):
        if part["type"] == "text":
            print(part["text"])
            continue
        image = part["image"].convert("RGB")
        print(f"[image {image.width}x{image.height}]")
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            image.save(folder / f"{name}_{index}.png")
        if sys.stdout.isatty() or os.environ.get("FORCE_COLOR"):
            print(blocks(image))


def blocks(image: Image.Image) -> str:
    """The image in half-block characters with 24-bit colours, at most 48 wide."""
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
