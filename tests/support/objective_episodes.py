"""Random episodes of tokens in float64, apart and packed, for comparing objectives with their references."""

from __future__ import annotations

import numpy as np
import torch

from learner.objective.loss_records import Tokens
from learner.training.update import token_weights
from shared.config.objective_section import ObjectiveConfig


def random_episodes(seed: int) -> list[dict[str, torch.Tensor]]:
    rng, episodes = np.random.default_rng(seed), []
    for length in rng.integers(1, 9, 6):
        names = ("logprobs", "behaviour", "reference", "entropies", "proximal")
        e = {name: torch.from_numpy(-rng.random(length)) for name in names}
        e |= {name: torch.from_numpy(rng.normal(size=length)) for name in ("values", "rewards")}
        e["advantage"] = torch.full((length,), rng.normal(), dtype=torch.float64)
        e["turn_end"] = torch.from_numpy(rng.random(length) < 0.4)
        e["turn_end"][-1] = True
        episodes.append(e)
    for e in episodes:
        for name in ("logprobs", "entropies", "values"):
            e[name].requires_grad_()
    return episodes


def packed_tokens(episodes: list[dict[str, torch.Tensor]], config: ObjectiveConfig) -> Tokens:
    cat = lambda name: torch.cat([e[name] for e in episodes])  # noqa: E731
    lengths = torch.tensor([len(e["logprobs"]) for e in episodes])
    episode_end = torch.zeros(int(lengths.sum()), dtype=torch.bool)
    episode_end[lengths.cumsum(0) - 1] = True
    lengths_N = lengths.repeat_interleave(lengths).double()
    names = ("logprobs", "entropies", "values", "rewards", "turn_end")
    return Tokens(
        **{name: cat(name) for name in names},
        behaviour_logprobs=cat("behaviour"),
        episode_end=episode_end,
        advantages=cat("advantage"),
        weights=token_weights(lengths_N, config),
        reference_logprobs=cat("reference"),
        proximal_logprobs=cat("proximal") if config.proximal == "learner" else None,
    )
