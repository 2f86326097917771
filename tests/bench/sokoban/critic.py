"""What the critic of a checkpoint explains of the returns, beside a perceptron fitted afterwards to the policy's final
states and the turn's index.

    python -m learner.export RUN/checkpoints/step_00000100 --out MODEL
    python launch/actors.py --config launch/recipes/sokoban_tiny.toml --model.path MODEL --record GROUPS \
        --learner.total_steps 1 --learner.groups_per_step 1024
    python -m tests.bench.sokoban.critic RUN/checkpoints/step_00000100 GROUPS

Half of the episodes fit the perceptron, a quarter says when to stop, and both are measured on the last quarter, which
neither has seen. Returns are discounted as the run's objective has them, to the end of the episode. `tokens` is of all
sampled tokens, `turns` of the first of each turn. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from learner.batch.episodes import make_episodes
from learner.batch.image_decoder import ImageDecoder
from learner.batch.packer import pack
from learner.checkpoints.wholeness import read_meta
from learner.distributed import Ranks, close_ranks, init_ranks
from learner.model.critic import DeepCritic
from learner.model.policy import Policy
from learner.model.sharding import forward_only
from learner.replay import policy_of
from learner.vtrace import token_vtrace
from shared.config.objective_section import ObjectiveConfig
from shared.config.recipe import fail
from shared.recordings.episode_format import StepHeader
from shared.recordings.group_files import files, read

EPISODES_AT_ONCE = 16
WIDTH, RATE, ROWS = 256, 1e-3, 1024
PATIENCE, MOST_EPOCHS = 8, 100


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """Sampled tokens of some episodes, [N] each, `final` [N, H]."""

    final: Tensor  # what the policy's head reads
    turns: Tensor  # int64: index in the episode
    values: Tensor  # the critic's
    returns: Tensor
    first: Tensor  # bool: of its turn


@torch.no_grad()
def seen(paths: list[Path], policy: Policy, objective: ObjectiveConfig, ranks: Ranks) -> Seen:
    """All tokens of the recorded groups, by one forward each."""
    decoder = ImageDecoder(policy.spec)
    episodes = make_episodes([read(path) for path in paths], decoder, objective)
    heard: list[tuple[Tensor, Tensor]] = []
    hook = policy.value_head.register_forward_pre_hook(lambda _, inputs: heard.append((inputs[0][-1], inputs[1])))
    values, returns, first = [], [], []
    for start in range(0, len(episodes), EPISODES_AT_ONCE):
        batch = pack(episodes[start : start + EPISODES_AT_ONCE], decoder, ranks.device)
        output = forward_only(policy, batch, 1.0)
        ends = batch.turn_end, batch.episode_end
        zeros = torch.zeros_like(output.values)  # with lambda 1 the targets are the returns, whatever the values
        found = token_vtrace(zeros, batch.rewards, zeros, *ends, gamma=objective.gamma, lam=1.0, rho_bar=1.0, c_bar=1.0)
        returns.append(found.vs)
        values.append(output.values)
        first.append(torch.cat((torch.ones_like(ends[0][:1]), ends[0][:-1])))
    hook.remove()
    final, turns = (torch.cat(column) for column in zip(*heard, strict=True))
    return Seen(final, turns, torch.cat(values), torch.cat(returns), torch.cat(first))


def fitted(fit: Seen, stop: Seen, seed: int = 0) -> DeepCritic:
    """A perceptron over final states and turns, of the fewest errors on `stop`."""
    torch.manual_seed(seed)
    critic = DeepCritic(fit.final.shape[1], 1, WIDTH)
    optimizer = torch.optim.AdamW(critic.parameters(), lr=RATE, weight_decay=0.01)
    best, kept, waited = float("inf"), critic.state_dict(), 0
    for _ in range(MOST_EPOCHS):
        for rows in torch.randperm(len(fit.returns)).split(ROWS):
            error = critic([fit.final[rows]], fit.turns[rows]) - fit.returns[rows]
            optimizer.zero_grad()
            error.square().mean().backward()
            optimizer.step()
        with torch.no_grad():
            loss = float((critic([stop.final], stop.turns) - stop.returns).square().mean())
        waited = 0 if loss < best else waited + 1
        if loss < best:
            best, kept = loss, {name: value.clone() for name, value in critic.state_dict().items()}
        if waited == PATIENCE:
            break
    critic.load_state_dict(kept)
    return critic


def explained(values: Tensor, returns: Tensor) -> float:
    """1 - variance of what is left over the variance of the returns."""
    return round(1.0 - float((returns - values).var(correction=0) / returns.var(correction=0)), 4)


def measure(checkpoint: Path, folder: Path, ranks: Ranks) -> dict[str, Any]:
    recipe = read_meta(checkpoint, ranks)["recipe"]
    objective = ObjectiveConfig(**recipe["learner"]["objective"])
    if not objective.critic_width:
        raise ValueError(f"{checkpoint} has no critic over several layers: learner.objective.critic_width is 0")
    paths = files(folder)
    if len(paths) < 4:
        raise ValueError(f"{folder} holds {len(paths)} groups; record some hundreds with launch/actors.py --record")
    model = {name: recipe["model"][name] for name in ("min_pixels", "max_pixels", "dtype")}
    policy = policy_of(str(checkpoint), StepHeader(step=0, version=0, time=0.0, **model), ranks)
    half, quarter = len(paths) // 2, 3 * len(paths) // 4
    fit, stop, held_out = (
        seen(part, policy, objective, ranks) for part in (paths[:half], paths[half:quarter], paths[quarter:])
    )
    perceptron = fitted(fit, stop)
    with torch.no_grad():
        others = perceptron([held_out.final], held_out.turns)
    found: dict[str, Any] = {"groups": len(paths), "tokens_held_out": len(others)}
    for name, rows in (("tokens", torch.ones_like(held_out.first)), ("turns", held_out.first)):
        returns = held_out.returns[rows]
        found[name] = {
            "critic": explained(held_out.values[rows], returns),
            "fitted": explained(others[rows], returns),
        }
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("groups", type=Path, help="a folder that launch/actors.py --record wrote")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    try:
        found = measure(options.checkpoint, options.groups, init_ranks("cpu"))
    except (ValueError, OSError) as error:
        return fail(error)
    finally:
        close_ranks()
    print(json.dumps({"benchmark": "critic", **found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
