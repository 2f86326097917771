"""How well a small Sokoban model reads held-out boards: what probability it gives to each true word, by kind and turn.

    python -m tests.bench.sokoban.reading MODEL --games 100 [--walls 0.05 0.3] [--boxes 2]

Episodes are played at random, good moves among the random ones within reach, and the model is asked for every word
after the true ones before it (teacher-forced). A word is read right where it has more than half of the probability.
`choices` are the good moves alone. `thoughts` is the share of turns whose <think> is right in every word, `drawn` the
probability that it would be at temperature 1. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from actor.render import Renderer
from envs.boards.board_words import TURNS
from launch.tiny_models.demonstrations import TASKS, Lesson
from launch.warm_start import demonstration
from learner.batch.episodes import make_episode
from learner.batch.image_decoder import ImageDecoder
from learner.batch.packer import pack
from learner.model.policy import load_policy
from shared.config.objective_section import ObjectiveConfig
from shared.types import Trajectory
from shared.vision import VisionSpec

FIRST_SEED = 2_000_000_000
GUESS = 0.5  # weight that marks words that chance chose
KINDS = {
    "@": "frame",
    "+": "relative",
    "-": "relative",
    ">": "relative",
    "=": "room",
    "#": "walls",
    "~": "walls beside",
    "!": "idle",
}


def kind_of(word: str, weight: float) -> str:
    """Of a written word; `weight`: GUESS where chance chose it."""
    word = word.strip()
    if weight < 1:
        return "guesses"
    if word in TURNS:
        return "choices"
    return "cells" if word.isdigit() else KINDS.get(word[:1], "moves and form")


def measure(model: str, games: int, walls: tuple[float, ...], boxes: tuple[int, ...]) -> dict[str, Any]:
    spec, tokenizer = VisionSpec.load(model), PreTrainedTokenizerFast.from_pretrained(model)
    policy, decoder, renderer = load_policy(model, spec).eval(), ImageDecoder(spec), Renderer(tokenizer, spec)
    lesson = Lesson(expertise=0.5, wall_chances=walls, boxes=boxes, split="heldout")
    kinds: dict[str, list[float]] = defaultdict(list)
    turns: dict[int, list[float]] = defaultdict(list)
    for seed in range(FIRST_SEED, FIRST_SEED + games):
        shown = demonstration(TASKS["sokoban"], seed, renderer, tokenizer, lesson, GUESS)
        episode = make_episode(shown, 0.0, decoder, ObjectiveConfig())
        with torch.no_grad():
            found = policy(pack([episode], decoder, torch.device("cpu")), 1.0).logprobs.tolist()
        for number, words in enumerate(said(shown, found, tokenizer), start=1):
            for word, weight, logprob in words:
                kinds[kind_of(word, weight)].append(logprob)
            thought = words[: next(i for i, word in enumerate(words) if word[0].strip() == "</think>")]
            turns[number].append(min(logprob for *_, logprob in thought))
            kinds["drawn"].append(sum(logprob for *_, logprob in thought))
    drawn = kinds.pop("drawn")
    return {
        "games": games,
        "turns": len(drawn),
        "thoughts": share([worst for found in turns.values() for worst in found]),
        "drawn": round(float(torch.tensor(drawn).exp().mean()), 4),
        "tokens_a_turn": round(sum(map(len, kinds.values())) / len(drawn), 1),
        "kinds": {kind: share(found) for kind, found in sorted(kinds.items()) if kind != "guesses"},
        "by_turn": {str(number): share(found) for number, found in sorted(turns.items())},
    }


def said(
    shown: Trajectory, logprobs: list[float], tokenizer: PreTrainedTokenizerFast
) -> list[list[tuple[str, float, float]]]:
    """Of each turn, the tokens written: text, weight, logprob."""
    left, found = iter(logprobs), list[list[tuple[str, float, float]]]()
    for turn in shown.turns:
        places = range(turn.start, turn.end)
        texts = [str(tokenizer.decode([int(shown.token_ids[i])])) for i in places]
        weights = [float(w) for w in torch.from_numpy(shown.behaviour_logprobs[turn.start : turn.end]).exp()]
        found.append([(text, weight, next(left)) for text, weight in zip(texts, weights, strict=True)])
    return found


def share(logprobs: list[float]) -> float:
    """Of words that have more than half of the probability."""
    return round(sum(logprob > math.log(0.5) for logprob in logprobs) / len(logprobs), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--games", type=int, default=100)
    parser.add_argument("--walls", type=float, nargs="+", default=[0.05], help="each board draws one")
    parser.add_argument("--boxes", type=int, nargs="+", default=[1], help="each board draws one")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(str(options.model), options.games, tuple(options.walls), tuple(options.boxes))
    for name in ("kinds", "by_turn"):
        for key, value in found[name].items():
            print(f"{name:8} {key:16} {value:.4f}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
