"""Makes a small model from nothing: builds it, then teaches it by supervised learning to read the image and to answer
in the task's format. `make tiny-models` makes the shipped ones, in stages:

    python launch/warm_start.py sokoban --out stage1 --tower-steps 300 --steps 800 --batch 32 --turns 2 --jump 1
    python launch/warm_start.py sokoban --start stage1 --out stage2 --seed 1 --steps 1500 --jump 0.5 --freeze-tower

What is shown is in `launch.tiny_models.demonstrations`.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from msgspec.structs import replace
from transformers import PreTrainedTokenizerFast

from actor.chat_episode import shown_episode
from actor.render import Fragment, Renderer
from launch.tiny_models import build as tiny_model
from launch.tiny_models.demonstrations import TASKS
from launch.tiny_models.lesson import CELL_PIXELS, DemonstratedAnswer, Lesson, Task
from launch.tiny_models.tower_lessons import teach_tower
from learner.batch.episodes import make_episode
from learner.batch.image_decoder import ImageDecoder
from learner.batch.packer import pack
from learner.model.policy import Policy
from learner.model.sharding import compile_blocks
from learner.training.optim import make_optimizer, set_learning_rates
from shared.config.learner_section import OptimizerConfig
from shared.config.objective_section import ObjectiveConfig
from shared.config.optimizer_specs import OPTIMIZERS
from shared.families.registry import FAMILIES
from shared.types import Trajectory
from shared.vision import VisionSpec

WARM_UP = 50  # steps of the learning rate's warm-up
FIRST_SEED = 1_000_000_000  # training seeds are below, held-out seeds from 2_000_000_000 on


def demonstration(
    task: Task,
    seed: int,
    renderer: Renderer,
    tokenizer: PreTrainedTokenizerFast,
    lesson: Lesson,
    choice_weight: float = 1.0,
) -> Trajectory:
    """Return one demonstrated episode: behaviour logprobs hold the logarithms of the tokens' weights in the loss
    (`choice_weight` for random choices)."""
    prompt = task.prompts[seed % len(task.prompts)]
    parts: list[tuple[Fragment, list[int], bool]] = []
    weights: list[float] = []
    for messages, answer in task.demonstrate(seed, random.Random(f"demonstration {seed}"), lesson):
        if parts:
            fragment = renderer.observation(*messages)
        else:
            fragment = renderer.start([{"role": "system", "content": prompt}, *messages], tools=task.tools)
        answer_ids, answer_weights = weighted(answer, tokenizer, choice_weight, renderer.spec.family.ends_of_turn[0])
        parts.append((fragment, answer_ids, True))
        weights += [1.0] * len(fragment.token_ids) + answer_weights
    return replace(shown_episode(parts), behaviour_logprobs=np.log(weights, dtype=np.float32))


def weighted(
    answer: DemonstratedAnswer, tokenizer: PreTrainedTokenizerFast, choice_weight: float, end: str
) -> tuple[list[int], list[float]]:
    """Return the tokens of an answer, including the token `end`, and their weights in the loss."""
    encoded = tokenizer(answer.text + end, add_special_tokens=False, return_offsets_mapping=True)
    weights = [
        choice_weight if any(start < b and a < end for a, b in answer.guesses) else 1.0
        for start, end in encoded["offset_mapping"]
    ]
    return encoded["input_ids"], weights


def train(task: Task, options: argparse.Namespace) -> None:
    """Train the model to maximise the weighted mean logprob of the demonstrated answers; the learning rate has a
    warm-up, then decays to 0."""
    steps = options.steps
    phrases = list(task.phrases) * 50 + ["system\n", "user\n", "assistant\n", "\n"] * 200
    vocab_size = task.model.get("vocab_size", 640)
    tokens = FAMILIES[task.model.get("family", "qwen3_vl")].small_tokenizer or tiny_model.QWEN
    template = tiny_model.TOOLS_TEMPLATE if task.tools and tokens is tiny_model.QWEN else ""
    tokenizer = tiny_model.build_tokenizer(phrases, vocab_size, template, tokens)
    model = tiny_model.build_model(tiny_model.build_config(tokenizer, **task.model), options.seed)
    if options.start is not None:
        start = type(model).from_pretrained(options.start, dtype=torch.float32)
        model.load_state_dict(start.state_dict())
    tiny_model.save(options.out, model, tokenizer)
    spec = VisionSpec.load(options.out, max_pixels=task.max_pixels)
    policy, decoder, renderer = Policy(model, spec), ImageDecoder(spec), Renderer(tokenizer, spec)
    if options.tower_steps:
        teach_tower(policy, task.pictures, pixels=CELL_PIXELS, steps=options.tower_steps, seed=options.seed)
    if policy.tower is not None:
        policy.tower.requires_grad_(not options.freeze_tower)
    if options.compile:
        compile_blocks(policy)
    settings, device = ObjectiveConfig(), torch.device("cpu")
    lesson = Lesson(**{field.name: getattr(options, field.name) for field in fields(Lesson) if field.name in options})
    moves = OptimizerConfig(name=options.optimizer, lr=options.lr, betas=(0.9, 0.98), weight_decay=0.01)
    optimizer = make_optimizer(policy, moves)
    started = time.monotonic()
    for step in range(steps):
        set_learning_rates(optimizer, min(1.0, (step + 1) / WARM_UP) * (1 - step / steps) ** options.decay)
        first = FIRST_SEED + options.seed * 10_000_000 + step * options.batch
        seeds = range(first, first + options.batch)
        shown = [demonstration(task, s, renderer, tokenizer, lesson, options.choice_weight) for s in seeds]
        episodes = [make_episode(t, 0.0, decoder, settings) for t in shown]
        microbatch = pack(episodes, decoder, device, share_prefixes=False)
        weights = microbatch.behaviour_logprobs.exp()
        loss = -(weights * policy(microbatch, 1.0).logprobs).sum() / weights.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 50 == 0 or step + 1 == steps:
            minutes = (time.monotonic() - started) / 60
            print(f"step {step + 1}/{steps}  loss {loss.item():.3f}  {minutes:.1f} min", flush=True)
        if (step + 1) % 200 == 0:
            tiny_model.save(options.out, model, tokenizer)
    tiny_model.save(options.out, model.bfloat16(), tokenizer)


def mistake(options: argparse.Namespace) -> str:
    """Return what is wrong with the options, in one line; "" if nothing is."""
    if not 0 < options.choice_weight <= 1:
        return f"--choice-weight {options.choice_weight}: use a number above 0, at most 1"
    if not 0 <= options.scatter <= 1:
        return f"--scatter {options.scatter}: it is a share, from 0 to 1"
    if options.tower_steps and not TASKS[options.task].pictures:
        return f"--tower-steps {options.tower_steps}: only the tower of sokoban, games and scene_zoom is taught alone"
    for name, least in (("steps", 1), ("tower_steps", 0), ("batch", 1), ("threads", 1)):
        if getattr(options, name) < least:
            return f"--{name.replace('_', '-')} {getattr(options, name)}: at least {least}"
    out = options.out
    if file := next((path for path in (out, *out.parents) if path.exists() and not path.is_dir()), None):
        return f"--out {out}: {file} is a file; name a folder"
    if out.is_dir() and any(out.iterdir()) and not (out / "config.json").is_file():
        return f"--out {out}: it holds other things than a model; name a new folder, or that of a model to replace"
    return ""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=sorted(TASKS))
    parser.add_argument("--out", type=Path, required=True, help="folder of the model; one that is there is replaced")
    parser.add_argument("--start", type=Path, help="folder of a model to go on from")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--batch", type=int, default=8, help="episodes of one step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--optimizer", choices=sorted(OPTIMIZERS), default="adamw")
    parser.add_argument("--decay", type=float, default=0.5, help="power of the decay: 1 is linear")
    parser.add_argument("--compile", action="store_true", help="compile the blocks: pays after some 200 steps")
    parser.add_argument("--expertise", type=float, default=0.4, help="share of answers that are good ones")
    parser.add_argument("--reach", type=int, default=3, help="Sokoban: good moves are shown this near to the solution")
    parser.add_argument("--jump", type=float, default=0.0, help="Sokoban: share of turns that show a fresh board")
    parser.add_argument("--near", type=float, default=0.0, help="Sokoban: share of boards that begin within --reach")
    parser.add_argument(
        "--scatter",
        type=float,
        default=0.0,
        help="Sokoban: share of turns that begin with player and boxes on cells drawn at random, which no play reaches",
    )
    parser.add_argument(
        "--choice-weight",
        type=float,
        default=1.0,
        help="weight in the loss of what is drawn by lot, from which nothing can be learned",
    )
    parser.add_argument("--turns", type=int, default=8, help="Sokoban, triangles, games: turns of one episode, at most")
    parser.add_argument("--wall-chances", type=float, nargs="+", default=(0.05,), help="Sokoban: each board draws one")
    parser.add_argument("--boxes", type=int, nargs="+", default=(1,), help="Sokoban: each board draws one of these")
    parser.add_argument(
        "--tower-steps", type=int, default=0, help="Sokoban, games, scene_zoom: first teach the vision tower alone"
    )
    parser.add_argument("--freeze-tower", action="store_true", help="demonstrations do not train the vision tower")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(argv)
    if why := mistake(options):
        parser.error(why)
    if (options.out / "config.json").is_file():
        print(f"the model in {options.out} is replaced", flush=True)
    torch.set_num_threads(options.threads)
    train(TASKS[options.task], options)


if __name__ == "__main__":
    main()
