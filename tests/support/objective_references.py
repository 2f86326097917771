"""Plain float64 transcriptions of the papers' objectives, episode by episode: what tests compare with.

Each takes one list per episode and gives the loss that autograd differentiates: no masks, no packing, no detach tricks
but where the paper holds a quantity fixed.
"""

from __future__ import annotations

import math

import torch

Episode = dict[str, torch.Tensor]


def aggregate(terms: list[torch.Tensor], aggregation: str) -> torch.Tensor:
    """`terms`: one [K] tensor an episode."""
    if aggregation == "token_mean":
        return sum(t.sum() for t in terms) / sum(len(t) for t in terms)
    return sum(t.mean() for t in terms) / len(terms)


def surrogate(ratio: torch.Tensor, advantage: torch.Tensor, low: float, high: float, dual: float | None):
    """PPO's clipped surrogate, to be maximised, with the dual clip for negative advantages."""
    value = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    return value if dual is None else torch.where(advantage < 0, torch.maximum(value, dual * advantage), value)


def grpo(episodes: list[Episode], config) -> torch.Tensor:
    terms = []
    for e in episodes:
        ratio = (e["logprobs"] - e["behaviour"]).exp()
        if config.pg_rho_bar is not None:  # the weight is truncated, its gradient through log pi kept
            weight = ratio.detach().clamp(max=config.pg_rho_bar) / ratio.detach()
        else:
            weight = torch.ones_like(ratio)
        terms.append(-weight * surrogate(ratio, e["advantage"], config.clip_low, config.clip_high, config.dual_clip))
    return aggregate(terms, config.aggregation)


def gspo(episodes: list[Episode], config) -> torch.Tensor:
    terms = []
    for e in episodes:
        ratio = (e["logprobs"] - e["behaviour"]).mean().exp()
        one = surrogate(ratio, e["advantage"][0], config.clip_low, config.clip_high, config.dual_clip)
        terms.append(-one.expand(len(e["logprobs"])))
    return aggregate(terms, config.aggregation)


def cispo(episodes: list[Episode], config) -> torch.Tensor:
    terms = []
    for e in episodes:
        weight = (e["logprobs"] - e["behaviour"]).exp().clamp(1 - config.clip_low, 1 + config.clip_high).detach()
        terms.append(-weight * e["advantage"] * e["logprobs"])
    return aggregate(terms, config.aggregation)


def bar(x: float, limit: float | None) -> float:
    return x if limit is None else min(x, limit)


def actions_of(e: Episode, config) -> list[tuple[int, int, float]]:
    """(first token, behind the last, log rho) of each action of an episode."""
    ends = (e["turn_end"].nonzero()[:, 0] + 1).tolist()
    if config.vtrace_level == "token":
        ends = list(range(1, len(e["logprobs"]) + 1))
    log_rhos, found, start = (e["logprobs"] - e["behaviour"]).tolist(), [], 0
    for end in ends:
        total = math.fsum(log_rhos[start:end])
        found.append((start, end, total if config.turn_ratio == "product" else total / (end - start)))
        start = end
    return found


def vtrace(episodes: list[Episode], config) -> torch.Tensor:
    """Targets by the recursion of the paper's remark 1, in Python numbers; then one term an action."""
    terms = []
    for e in episodes:
        actions, per_token = actions_of(e, config), torch.zeros(len(e["logprobs"]), dtype=torch.float64)
        next_vs = next_value = 0.0
        for start, end, log_rho in reversed(actions):
            rho, value, last = math.exp(log_rho), e["values"][start].item(), end == len(e["logprobs"])
            between_turns = bool(e["turn_end"][end - 1])
            gamma = 0.0 if last else config.gamma if between_turns else 1.0
            lam = config.lam if between_turns else 1.0
            reward = e["rewards"][start:end].sum().item()
            delta = bar(rho, config.rho_bar) * (reward + gamma * next_value - value)
            vs = value + delta + gamma * lam * bar(rho, config.c_bar) * (next_vs - next_value)
            q = reward + gamma * (lam * next_vs + (1 - lam) * next_value)
            advantage = q - value
            clipped = config.vtrace_clip and (
                rho > 1 + config.clip_high if advantage > 0 else rho < 1 - config.clip_low and advantage < 0
            )
            weight = 0.0 if clipped else bar(rho, config.pg_rho_bar)
            error = e["values"][start] - vs
            if config.value_clip is None or abs(error.item()) <= config.value_clip:
                critic = 0.5 * error**2
            else:
                critic = config.value_clip * (error.abs() - 0.5 * config.value_clip)
            for t in range(start, end):
                per_token[t] = -weight * advantage * e["logprobs"][t] + config.value_coef * critic
            next_vs, next_value = vs, value
        terms.append(per_token)
    return aggregate(terms, config.aggregation)


def extras(episodes: list[Episode], config) -> torch.Tensor:
    """KL to the reference and entropy; the objective is the sum of this and one of the above."""
    terms = []
    for e in episodes:
        log_ratio = e["logprobs"] - e["reference"]
        kl = {"k2": 0.5 * log_ratio**2, "k3": (-log_ratio).exp() - 1 + log_ratio}[config.kl_estimator]
        terms.append(config.kl_coef * kl - config.entropy_coef * e["entropies"])
    return aggregate(terms, config.aggregation)


REFERENCES = {"vtrace": vtrace, "grpo": grpo, "gspo": gspo, "cispo": cispo}
