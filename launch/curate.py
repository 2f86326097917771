"""Writes a run's best recorded episodes as demonstrations, for launch/sft.py:

    python launch/curate.py RUN --min-reward X [--best-of-group] [--at-most N] --out FILE.jsonl

RUN is a run's folder whose steps were recorded (record.every). Episodes of evaluations are left out: their samples are
held out. Each line is a chat with its images inside; an answer whose text would be cut into other tokens than the
policy sampled has these as `token_ids`. Every line is read back before it is written: it is the recorded episode, token
by token, or it is left out and counted. An episode of several segments is a line for each.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if __name__ == "__main__":  # a Ctrl-C amid these imports waits: as an exception there it leaves a traceback or is lost
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))

import argparse
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from actor.chat_episode import chat_episode
from actor.render import Renderer
from envs.chat_rows import chat_of
from envs.datasets import data_uri
from launch.processes.children import run_program
from shared.config.recipe import ConfigError, fail
from shared.log import get_logger
from shared.recordings.episode_format import RecordedEpisode, Summary
from shared.recordings.reader import FOLDER, RecordedStep, RecordingError, read_image, read_step, steps
from shared.util.own_commands import called_as
from shared.vision import VisionSpec

LOG = get_logger("curate")
START = "<|im_start|>"  # the control token that begins a message in ChatML
UNLIMITED = 1 << 30


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=called_as("python launch/curate.py"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--min-reward", type=float, required=True, metavar="X", help="least reward of an episode")
    parser.add_argument("--best-of-group", action="store_true", help="of each group only the episode of most reward")
    parser.add_argument("--at-most", type=int, default=0, metavar="N", help="so many episodes, those of most reward")
    parser.add_argument(
        "--model", default="", metavar="FOLDER", help="the model, if it is no longer where the run had it"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="a new .jsonl file")
    options = parser.parse_args(argv)
    try:
        record = curate(options)
    except (ValueError, OSError) as error:
        return fail(error)
    print(json.dumps(record), flush=True)
    return 0


def curate(options: argparse.Namespace) -> dict[str, Any]:
    """Write the chosen episodes; return how many were seen and written. Raise ValueError, in one line, if there are no
    recordings or no episode is left, RecordingError if they cannot be read."""
    if options.out.suffix != ".jsonl" or options.out.exists():
        what = "it is there already" if options.out.exists() else "it does not end in .jsonl"
        raise ConfigError(f"--out {options.out}: {what}; name a new .jsonl file")
    if options.at_most < 0:
        raise ConfigError(f"--at-most {options.at_most}: at least 1, or 0 for all")
    paths = steps(options.run) or steps(options.run / FOLDER)
    if not paths:
        raise ConfigError(
            f"{options.run} holds no recorded steps: give the folder of a run with record.every above 0 (record.groups "
            "says how many groups of a step are recorded)"
        )
    seen, chosen = choose(paths, options)
    known: dict[tuple[str, int, int], Renderer] = {}
    left_out: Counter[str] = Counter()
    written = rows = 0
    partial = options.out.with_name(f".{options.out.name}.partial")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with partial.open("w", encoding="utf-8") as file:
            for step, summary in sorted(chosen, key=lambda place: (place[0].path, place[1].offset)):
                renderer = _renderer_of(step, options.model, known)
                try:
                    lines = [*rows_of(step.episode(summary), step.path.parent, renderer)]
                except ValueError as error:
                    left_out[" ".join(str(error).split())[:200]] += 1
                    continue
                file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
                written, rows = written + 1, rows + len(lines)
        for reason, count in left_out.items():
            LOG.warning("%d of the episodes are left out: %s", count, reason)
        if not written:
            raise ValueError(f"none of the {len(chosen)} chosen episodes of {options.run} can be written as a chat")
        os.replace(partial, options.out)
    finally:
        partial.unlink(missing_ok=True)
    return {
        "seen": seen,
        "episodes": written,
        "rows": rows,
        "left_out": sum(left_out.values()),
        "out": str(options.out),
    }


def choose(paths: Sequence[Path], options: argparse.Namespace) -> tuple[int, list[tuple[RecordedStep, Summary]]]:
    """Return the number of sound recorded episodes, and those that the options choose, those of most reward first.
    Raise ValueError if none has the reward."""
    found: dict[tuple[str, int], tuple[RecordedStep, Summary]] = {}
    for step in map(read_step, paths):
        for each in step.summaries:
            if not each.failed and each.tokens:
                found.setdefault((each.ticket_id, each.index), (step, each))
    ordered = sorted(found.values(), key=lambda place: -place[1].reward)
    chosen = [place for place in ordered if place[1].reward >= options.min_reward]
    if options.best_of_group:
        best: dict[str, tuple[RecordedStep, Summary]] = {}
        for place in chosen:
            best.setdefault(place[1].ticket_id, place)
        chosen = [*best.values()]
    if not chosen:
        most = f"the most is {ordered[0][1].reward:g}" if ordered else "none is sound"
        raise ConfigError(
            f"no recorded episode of {options.run} has a reward of {options.min_reward:g}: of {len(ordered)} {most}; "
            "lower --min-reward"
        )
    return len(ordered), chosen[: options.at_most or None]


def rows_of(episode: RecordedEpisode, folder: Path, renderer: Renderer) -> Iterator[dict[str, Any]]:
    """Yield a chat for each segment of an episode. Raise ValueError if one would not be read back as it was played."""
    ids, mask = episode.token_ids.numpy(), episode.loss_mask.numpy()
    bounds = [0, *episode.segments, len(ids)]
    images = [read_image(folder, image) for image in episode.images]
    for start, end in pairwise(bounds):
        count = int((ids[start:end] == renderer.image_id).sum())
        own, images = images[:count], images[count:]
        turns = [(turn.start, turn.end) for turn in episode.turns if start <= turn.start < end]
        if not turns:
            continue
        row = {"messages": [*_messages(ids, start, turns, iter(own), renderer)], "reward": episode.reward}
        row |= {"sample": episode.sample_id, "episode": episode.id}
        last = turns[-1][1]
        again = chat_episode(chat_of(row, folder), renderer, UNLIMITED)
        same = np.array_equal(again.token_ids, ids[start:last]) and np.array_equal(again.loss_mask, mask[start:last])
        shown = [bytes(image.data) for image in again.images]
        if not same or shown != own[: len(shown)]:
            raise ValueError("the chat template does not write it as it was played")
        yield row


def _messages(
    ids: np.ndarray, start: int, turns: Sequence[tuple[int, int]], images: Iterator[bytes], renderer: Renderer
) -> Iterator[dict[str, Any]]:
    """Yield the messages of a segment that begins at `start`, up to its last answer."""
    for begin, end in turns:
        yield from _shown(ids[start:begin].tolist(), images, renderer)
        sampled = tuple(ids[begin:end].tolist())
        if max(sampled) >= len(renderer.tokenizer):
            raise ValueError("an answer has a token that the tokenizer does not know")
        answer = renderer.decode(sampled)
        message: dict[str, Any] = {"role": "assistant", "content": answer}
        if renderer.foreign_answer(answer).token_ids != sampled:
            message["token_ids"] = [*sampled]
        yield message
        start = end


def _shown(ids: Sequence[int], images: Iterator[bytes], renderer: Renderer) -> Iterator[dict[str, Any]]:
    """Yield the messages that rendered tokens show before an answer. They are divided at control tokens, so that what a
    message spells like one is text. Raise ValueError for tokens of another form."""
    start_id = renderer.tokenizer.convert_tokens_to_ids(START)
    opened = [place for place, token in enumerate(ids) if token == start_id]
    wrong = ValueError(f"what is shown is not of messages that begin with {START}")
    if not opened:
        raise wrong
    head = ids[: opened[0]]
    if renderer.transcript(head[1:] if head and head[0] == renderer.end_id else head).strip("\n"):
        raise wrong  # an answer that another token ended is followed by the template's own
    for begin, stop in pairwise([*opened, len(ids)]):
        part = [*ids[begin + 1 : stop]]
        is_closed = renderer.end_id in part
        end = part.index(renderer.end_id) if is_closed else len(part)
        role, line, first = renderer.transcript(part[: _first_control(part[:end], renderer)]).partition("\n")
        is_last = stop == len(ids)
        if not line or is_closed == is_last or renderer.transcript(part[end + 1 :]).strip("\n"):
            raise wrong
        if is_last:
            return
        parts = [*_parts(first, part[_first_control(part[:end], renderer) : end], images, renderer)]
        is_text = all(each["type"] == "text" for each in parts)
        message = {"role": role, "content": "".join(each["text"] for each in parts) if is_text else parts}
        yield message | ({"weight": 0} if role == "assistant" else {})


def _first_control(ids: Sequence[int], renderer: Renderer) -> int:
    """Return where the first token of an image stands; the number of tokens without one."""
    controls = {renderer.image_id, *renderer.banned_ids}
    return next((place for place, token in enumerate(ids) if token in controls), len(ids))


def _parts(first: str, ids: Sequence[int], images: Iterator[bytes], renderer: Renderer) -> Iterator[dict[str, Any]]:
    """Yield the parts of a message: the text `first`, then images and texts."""
    if first:
        yield {"type": "text", "text": first}
    while len(ids):
        if ids[0] == renderer.image_id:
            image = next(images, None)
            if image is None:
                raise ValueError("it shows more images than are recorded")
            yield {"type": "image", "image": data_uri(image)}
            ids = ids[1:]
        elif ids[0] in renderer.banned_ids:  # the marks around an image, which the template writes
            ids = ids[1:]
        else:
            end = _first_control(ids, renderer)
            yield {"type": "text", "text": renderer.transcript(ids[:end])}
            ids = ids[end:]


def _renderer_of(step: RecordedStep, model: str, known: dict[tuple[str, int, int], Renderer]) -> Renderer:
    """Return the renderer with which a recorded step was played. Raise RecordingError if its model is gone, ConfigError
    if its turns have another form than those that can be read."""
    from transformers import PreTrainedTokenizerFast

    header = step.header
    key = (model or header.model, header.min_pixels, header.max_pixels)
    if key not in known:
        if not Path(key[0], "config.json").is_file():
            raise RecordingError(
                f"{step.path} was played by {key[0]!r}, which is no folder of a model; name it with --model"
            )
        bounds = {"min_pixels": key[1], "max_pixels": key[2]}
        made = Renderer(PreTrainedTokenizerFast.from_pretrained(key[0]), VisionSpec.load(key[0], **bounds))
        if START not in made.tokenizer.get_vocab():
            raise ConfigError(f"turns of {key[0]} do not begin with {START}: their recordings cannot be read as chats")
        known[key] = made
    return known[key]


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    run_program(main)
