"""Draw an episode as one PNG: a strip of what the model saw, each image with the answer that led to it.

    python -m envs.show envs.sokoban --seed 3 --solve --out episode.png
    python -m envs.show envs.geo3k_multi_turn --seed 1 --answers answers.txt

Answers come from a file (one line a turn, \\n for a line break), from the best play (`--solve`, for environments with
`best_response`) or at random.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # started by its path, from anywhere
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import textwrap
from random import Random
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from envs.base import total_turn_reward
from envs.env_calls import close_env, messages_of, reset_env, responder, reward_of, step_env
from envs.play import parse, parser, start
from shared.rgb_images import to_rgb
from shared.util.user_errors import describe, trace_of

MARGIN, CAPTION_LINES, MIN_WIDTH = 8, 4, 160


def main(argv: list[str] | None = None) -> int:
    options = parser(__doc__)
    options.add_argument("--out", type=Path, default=Path("episode.png"), help="the PNG to write")
    options.add_argument("--answers", type=Path, help="file with the model's answers, one line a turn")
    options.add_argument(
        "--solve", action="store_true", help="answer as the best play does (environments with best_response)"
    )
    chosen = parse(options, argv)
    try:
        if chosen.out.suffix.lower() not in Image.registered_extensions():
            raise ValueError(f"--out {chosen.out}: no picture can have that ending; give a name that ends with .png")
        module, env, messages = start(chosen)
        answers = chosen.answers.read_text(encoding="utf-8").splitlines() if chosen.answers else None
        frames, captions, reward = episode(module, env, messages, answers, chosen)
        strip(frames, captions).save(chosen.out)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (Exception, SystemExit) as error:  # noqa: BLE001  any exception here is the environment's mistake
        print(f"{trace_of(error)}\nerror: {chosen.module} raised {describe(error)}", file=sys.stderr)
        return 2
    print(f"{chosen.out}: {len(frames)} images, {len(frames) - 1} turns, reward {reward:.4f}")
    return 0


def episode(
    module: Any, env: Any, messages: list[dict[str, Any]], answers: list[str] | None, options: Any
) -> tuple[list[Image.Image], list[str], float]:
    """Play an episode; return its frames, a caption for each, and its reward."""
    observation, _ = reset_env(env)
    first = messages_of(env, observation) if observation else messages[-1:]
    frames, captions, infos = [frame(first)], ["start"], []
    rng, respond = Random(options.seed), responder(module, env)
    if options.solve and not hasattr(env, "best_response"):
        raise ValueError(f"--solve: {options.module} has no best_response; give --answers")
    for turn in range(options.max_turns):
        if answers is not None:
            if turn >= len(answers):
                break
            answer = answers[turn].replace("\\n", "\n")
        elif options.solve:
            answer = env.best_response()
        else:
            answer = respond(rng) if respond is not None else "?"
        observation, done, info = step_env(env, answer)
        infos.append(info)
        is_shown = bool(observation) or not done  # a last observation may be empty
        frames.append(frame(messages_of(env, observation)) if is_shown else frames[-1])
        captions.append(f"{turn + 1}: {answer}  reward {info.get('reward', 0.0):g}")
        if done:
            break
    reward = reward_of(module.episode_reward, env) if hasattr(module, "episode_reward") else total_turn_reward(infos)
    close_env(env)
    return frames, captions, reward


def frame(messages: list[dict[str, Any]]) -> Image.Image:
    """Return the images of an observation's messages side by side, or their texts as an image if they have none."""
    contents = [message["content"] for message in messages]
    texts = [[{"type": "text", "text": content}] if isinstance(content, str) else content for content in contents]
    parts: list[dict[str, Any]] = [part for content in texts for part in content]
    images = [to_rgb(part["image"]) for part in parts if part["type"] == "image"]
    if images:
        joined = Image.new("RGB", (sum(p.width for p in images), max(p.height for p in images)), "white")
        for index, image in enumerate(images):
            joined.paste(image, (sum(p.width for p in images[:index]), 0))
        return joined
    text = "\n".join(part["text"] for part in parts).expandtabs(1)
    lines = [line for row in text.splitlines() for line in (textwrap.wrap(row, 40) or [""])]
    return _written(lines, 0)


def strip(frames: list[Image.Image], captions: list[str]) -> Image.Image:
    """Return all frames in a row, each over its caption."""
    panels = []
    for image, caption in zip(frames, captions, strict=True):
        width = max(image.width, MIN_WIDTH)
        lines = textwrap.wrap(" ".join(caption.split()), max(16, width // 7))[:CAPTION_LINES]
        below = _written(lines, width)
        panel = Image.new("RGB", (width, image.height + below.height), "white")
        panel.paste(image, ((width - image.width) // 2, 0))
        panel.paste(below, (0, image.height))
        panels.append(panel)
    width = sum(panel.width + MARGIN for panel in panels) + MARGIN
    whole = Image.new("RGB", (width, max(panel.height for panel in panels) + 2 * MARGIN), "lightgray")
    left = MARGIN
    for panel in panels:
        whole.paste(panel, (left, MARGIN))
        left += panel.width + MARGIN
    return whole


def _written(lines: list[str], width: int) -> Image.Image:
    font = ImageFont.load_default(12)
    longest = max((int(font.getlength(line)) for line in lines), default=0)
    image = Image.new("RGB", (max(width, longest + 8), 15 * len(lines) + 8), "white")
    draw = ImageDraw.Draw(image)
    for index, line in enumerate(lines):
        draw.text((4, 4 + 15 * index), line, fill="black", font=font)
    return image


if __name__ == "__main__":
    sys.exit(main())
