"""Runs the learner's trainer on small problems, with episodes of a policy that may be several steps old."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from learner.distributed import Ranks
from learner.guards.divergence import braked, kl_of_a_step
from learner.training.trainer import Trainer
from shared.types import Ending, Group, Trajectory, Turn
from tests.support.episodes import learner_config
from tests.support.small.policy import CONTEXT, VOCAB_SIZE, SmallPolicy
from tests.support.small.problems import Problem

OBJECTIVES: dict[str, dict[str, Any]] = {  # other settings are the learner's defaults, except RATES
    "vtrace": {"objective": "vtrace"},
    "vtrace, turns": {"objective": "vtrace", "vtrace_level": "turn"},
    "ppo": {"objective": "ppo"},
    "grpo": {"objective": "grpo", "group_size": 8},
    "grpo, turns": {"objective": "grpo", "group_size": 8, "turn_advantage": "returns"},
    "dr_grpo": {"objective": "dr_grpo", "group_size": 8},
    "reinforce++": {"objective": "reinforce++", "group_size": 8},
    "gspo": {"objective": "gspo", "group_size": 8},
    "cispo": {"objective": "cispo", "group_size": 8},
    "sapo": {"objective": "sapo", "group_size": 8},
    "dppo": {"objective": "dppo", "group_size": 8},
}
RATES = {"lr": 1e-3, "value_lr": 5e-2}
FIRST_STATE = 16  # the token that names state 0
EPISODES = 64  # episodes of a step
WINDOW = 10  # steps over which a return is averaged


@torch.no_grad()
def play(
    policy: SmallPolicy, problem: Problem, count: int, version: int, rng: np.random.Generator
) -> tuple[list[Trajectory], float]:
    """Play episodes in parallel; return them, and their mean return without noise."""
    streams = [[FIRST_STATE] for _ in range(count)]
    logprobs = [[0.0] for _ in range(count)]
    ends: list[list[tuple[int, float]]] = [[] for _ in range(count)]
    states, earned, live, turn = [0] * count, 0.0, list(range(count)), 0
    while live:
        for _ in range(problem.turn_tokens):
            logprobs_NA = policy.logprobs(contexts([streams[i] for i in live])).numpy()
            chosen = (logprobs_NA + rng.gumbel(size=logprobs_NA.shape)).argmax(1)
            for row, i in enumerate(live):
                streams[i].append(int(chosen[row]))
                logprobs[i].append(float(logprobs_NA[row, chosen[row]]))
        going = []
        for i in live:
            states[i], mean, over = problem.step(states[i], streams[i][-1], turn)
            earned += mean / count
            ends[i].append((len(streams[i]), mean + problem.noise * float(rng.normal())))
            over = over or turn + 1 == problem.max_turns
            if over:
                ends[i][-1] = (ends[i][-1][0], ends[i][-1][1] + problem.shift)
            else:
                going.append(i)
                streams[i].append(FIRST_STATE + states[i])
                logprobs[i].append(0.0)
        live, turn = going, turn + 1
    return [episode(*each, problem.turn_tokens, version) for each in zip(streams, logprobs, ends, strict=True)], earned


def contexts(streams: Sequence[list[int]]) -> torch.Tensor:
    """Return the last CONTEXT tokens of each stream, latest first."""
    return torch.tensor([([VOCAB_SIZE] * CONTEXT + stream)[: -CONTEXT - 1 : -1] for stream in streams])


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


def train(
    problem: Problem, ranks: Ranks, policy: SmallPolicy, *, seed: int, steps: int, lag: int = 0, **settings: Any
) -> Iterator[float]:
    """Train `policy` in place; yield, after each step, the mean return of the policy that played. `lag` is the number
    of steps by which that policy is older than `policy`. The learning rate is braked as in the learner's loop."""
    config = learner_config(**{**RATES, "group_size": 1, "total_steps": steps, **settings})
    trainer, rng = Trainer(policy, config, ranks), np.random.default_rng(seed)  # type: ignore[arg-type]
    past = deque([deepcopy(policy) if lag else policy], lag + 1)
    for step in range(steps):
        episodes, earned = play(past[0], problem, EPISODES, max(0, step - lag), rng)
        cut = range(0, EPISODES, config.group_size)
        groups = [Group("g", "a", tuple(episodes[i : i + config.group_size])) for i in cut]
        if step == 0:
            trainer.start_critic(groups)
        metrics = trainer.step(groups, step)
        kl = kl_of_a_step(metrics, 1)
        if kl is not None:
            trainer.guard.brake = braked(trainer.guard, kl, config.guard.max_kl)
        past.append(deepcopy(policy) if lag else policy)
        yield earned


@dataclass(frozen=True, slots=True)
class Learned:
    # The first step at which the mean return over the last WINDOW steps reached the problem's threshold.
    reached: int | None
    kept: bool  # True if the mean return was still above it at the end


def learn(problem: Problem, ranks: Ranks, *, seed: int, steps: int, stop: bool = False, **settings: Any) -> Learned:
    """Train a new policy; with `stop` end as soon as the optimum is reached."""
    returns: list[float] = []
    reached = None
    for earned in train(problem, ranks, SmallPolicy(problem.num_actions, seed), seed=seed, steps=steps, **settings):
        returns.append(earned)
        if reached is None and len(returns) >= WINDOW and np.mean(returns[-WINDOW:]) >= problem.threshold:
            reached = len(returns)
            if stop:
                break
    return Learned(reached, bool(np.mean(returns[-WINDOW:]) >= problem.threshold))


def drift(problem: Problem, ranks: Ranks, *, seed: int, steps: int, **settings: Any) -> float:
    """Return KL(policy after `steps` steps, policy at the start), in nats per token, over episodes that the trained
    policy plays."""
    policy = SmallPolicy(problem.num_actions, seed, spread=1.5)
    start = deepcopy(policy)
    for _ in train(problem, ranks, policy, seed=seed, steps=steps, **settings):
        pass
    episodes, _ = play(policy, problem, 256, 0, np.random.default_rng(seed))
    seen = contexts([list(t.token_ids[:place]) for t in episodes for place in np.flatnonzero(t.loss_mask)])
    now_NA, then_NA = policy.logprobs(seen), start.logprobs(seen)
    return float((now_NA.exp() * (now_NA - then_NA)).sum(-1).mean())
