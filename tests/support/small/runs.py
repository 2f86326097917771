"""Runs of the learner's own trainer on small problems, with episodes of a policy that is so many steps old."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from learner.distributed import Ranks
from learner.trainer import Trainer
from shared.types import Ending, Group, Trajectory, Turn
from tests.support.episodes import learner_config
from tests.support.small.policy import CONTEXT, VOCAB_SIZE, SmallPolicy
from tests.support.small.problems import Problem

FIRST_STATE = 16  # the token that names state 0
EPISODES = 64  # of a step
OWN = {"lr": 1e-2, "value_lr": 5e-2}  # a small model's rates; all else is as the learner's defaults are


@dataclass(frozen=True)
class Played:
    """Episodes of one policy, and the mean of what they earned without noise."""

    episodes: list[Trajectory]
    mean_return: float


@torch.no_grad()
def play(policy: SmallPolicy, problem: Problem, count: int, version: int, rng: np.random.Generator) -> Played:
    """All episodes side by side."""
    states, ends, live = np.zeros(count, int), [[] for _ in range(count)], list(range(count))
    streams = [[FIRST_STATE] for _ in range(count)]
    logprobs: list[list[float]] = [[0.0] for _ in range(count)]
    earned, turn = np.zeros(count), 0
    while live:
        for _ in range(problem.turn_tokens):
            seen = torch.tensor([([VOCAB_SIZE] * CONTEXT + streams[i])[: -CONTEXT - 1 : -1] for i in live])
            logprobs_NA = policy.logprobs(seen).numpy()
            chosen = (logprobs_NA + rng.gumbel(size=logprobs_NA.shape)).argmax(1)
            for row, i in enumerate(live):
                streams[i].append(int(chosen[row]))
                logprobs[i].append(float(logprobs_NA[row, chosen[row]]))
        going = []
        for i in live:
            state, mean, over = problem.step(int(states[i]), streams[i][-1], turn)
            states[i], earned[i] = state, earned[i] + mean
            ends[i].append((len(streams[i]), mean + problem.noise * float(rng.normal())))
            if not over and turn + 1 < problem.max_turns:
                going.append(i)
                streams[i].append(FIRST_STATE + state)
                logprobs[i].append(0.0)
        live, turn = going, turn + 1
    episodes = [episode(*each, problem.turn_tokens, version) for each in zip(streams, logprobs, ends, strict=True)]
    return Played(episodes, float(earned.mean()))


def episode(
    stream: list[int], logprobs: list[float], ends: list[tuple[int, float]], turn_tokens: int, version: int
) -> Trajectory:
    mask = np.zeros(len(stream), dtype=np.uint8)
    for end, _ in ends:
        mask[end - turn_tokens : end] = 1
    return Trajectory(
        token_ids=np.array(stream, dtype=np.int32),
        loss_mask=mask,
        behaviour_logprobs=np.array(logprobs, dtype=np.float32),
        policy_versions=np.where(mask, version, -1).astype(np.int32),
        turns=tuple(Turn(end - turn_tokens, end, reward) for end, reward in ends),
        reward=sum(reward for _, reward in ends),
        images=(),
        ending=Ending.COMPLETED,
    )


@dataclass(frozen=True)
class Step:
    policy: SmallPolicy
    mean_return: float  # of the policy that played
    metrics: dict[str, float]


def train(
    problem: Problem,
    ranks: Ranks,
    *,
    seed: int,
    steps: int,
    lag: int = 0,
    start: SmallPolicy | None = None,
    **settings: Any,
) -> Iterator[Step]:
    """`lag`: steps between the policy that plays and the one that is trained."""
    policy = start or SmallPolicy(problem.num_actions, seed)
    config = learner_config(**{**OWN, "total_steps": steps, **settings})
    size = config.group_size
    trainer, rng, past = Trainer(policy, config, ranks), np.random.default_rng(seed), deque([deepcopy(policy)], lag + 1)  # type: ignore[arg-type]
    for step in range(steps):
        played = play(past[0], problem, EPISODES, max(0, step - lag), rng)
        cut = range(0, EPISODES, size)
        groups = [Group(f"g{i}", "a", tuple(played.episodes[i : i + size])) for i in cut]
        metrics = trainer.step(groups, step)
        past.append(deepcopy(policy))
        yield Step(policy, played.mean_return, metrics)
