"""Plain float64 transcriptions of the papers' objectives, episode by episode, as references for tests.

Each takes a list of episodes and returns the loss to differentiate: without masks or packing, and with detach only
where the paper holds a quantity fixed.
"""

from __future__ import annotations

import math

import torch

Episode = dict[str, torch.Tensor]


def aggregate(terms: list[torch.Tensor], config, kept: list[torch.Tensor] | None = None) -> torch.Tensor:
    """Return the loss from `terms`, one [K] tensor per episode. `kept` has 1 or 0 for each term; the mean is over those
    with 1, or all tokens' sum is divided by a constant for each episode."""
    if config.aggregation == "constant":
        parts = [(t if kept is None else k * t).sum() for t, k in zip(terms, kept or terms, strict=True)]
        return sum(parts) / config.aggregation_divisor / len(terms)
    kept = [torch.ones_like(t) for t in terms] if kept is None else kept
    weights = [k if config.aggregation == "token_mean" else k / len(k) for k in kept]
    return sum((w * t).sum() for w, t in zip(weights, terms, strict=True)) / sum(w.sum() for w in weights)


def kept_tokens(episodes: list[Episode], config) -> list[torch.Tensor]:
    """Return, per episode, 1 for each token that masked importance sampling keeps and 0 for others, computed in Python
    numbers."""
    kept = []
    for e in episodes:
        own = e["proximal"] if config.proximal == "learner" else e["logprobs"]
        ratios = [math.exp(x) for x in (own - e["behaviour"]).tolist()]
        mean = math.prod(ratios) ** (1 / len(ratios))
        low, high = config.mask_sequence_ratio or (0.0, math.inf)
        whole = low <= mean <= high and min(ratios) >= (config.mask_veto_ratio or 0.0)
        low, high = config.mask_token_ratio or (0.0, math.inf)
        kept.append(torch.tensor([float(whole and low <= r <= high) for r in ratios], dtype=torch.float64))
    return kept


def surrogate(ratio: torch.Tensor, advantage: torch.Tensor, config):
    """Return PPO's clipped surrogate, to be maximised, with the dual clip for negative advantages."""
    clamped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    value = torch.minimum(ratio * advantage, clamped * advantage)
    if config.dual_clip is None:
        return value
    return torch.where(advantage < 0, torch.maximum(value, config.dual_clip * advantage), value)


def ratio_and_weight(e: Episode, config, of=lambda log_ratio: log_ratio) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the differentiable ratio that is clipped, the fixed weight that multiplies it). `of` maps log ratios of
    tokens to those of actions."""
    limit = math.inf if config.pg_rho_bar is None else config.pg_rho_bar
    if config.proximal == "learner":  # pi/prox, and the truncated prox/mu
        weight = of(e["proximal"] - e["behaviour"]).exp().clamp(max=limit)
        return of(e["logprobs"] - e["proximal"]).exp(), weight.detach()
    ratio = of(e["logprobs"] - e["behaviour"]).exp()  # the weight is truncated; its gradient through log pi stays
    return ratio, ratio.detach().clamp(max=limit) / ratio.detach()


def grpo(episodes: list[Episode], config) -> torch.Tensor:
    terms = []
    for e in episodes:
        ratio, weight = ratio_and_weight(e, config)
        terms.append(-weight * surrogate(ratio, e["advantage"], config))
    return aggregate(terms, config, kept_tokens(episodes, config))


def gspo(episodes: list[Episode], config) -> torch.Tensor:
    terms = []
    for e in episodes:
        ratio, weight = ratio_and_weight(e, config, torch.mean)
        terms.append(-(weight * surrogate(ratio, e["advantage"][0], config)).expand(len(e["logprobs"])))
    return aggregate(terms, config, kept_tokens(episodes, config))


def cispo(episodes: list[Episode], config) -> torch.Tensor:
    terms = []
    for e in episodes:
        weight = (e["logprobs"] - e["behaviour"]).exp().clamp(max=1 + config.clip_high).detach()
        terms.append(-weight * e["advantage"] * e["logprobs"])
    return aggregate(terms, config, kept_tokens(episodes, config))


def bar(x: float, limit: float | None) -> float:
    return x if limit is None else min(x, limit)


def actions_of(e: Episode, config) -> list[tuple[int, int, float]]:
    """Return (first token, end, log rho) of each action of an episode."""
    ends = (e["turn_end"].nonzero()[:, 0] + 1).tolist()
    if config.vtrace_level == "token":
        ends = list(range(1, len(e["logprobs"]) + 1))
    log_rhos, found, start = (e["logprobs"] - e["behaviour"]).tolist(), [], 0
    log_rhos = [0.0 if abs(x) <= config.rho_noise else x for x in log_rhos]
    for end in ends:
        total = math.fsum(log_rhos[start:end])
        found.append((start, end, total if config.turn_ratio == "product" else total / (end - start)))
        start = end
    return found


def rewards_of(e: Episode, config) -> torch.Tensor:
    if not config.kl_in_reward:
        return e["rewards"]
    return e["rewards"] - config.kl_coef * (e["logprobs"] - e["reference"]).detach()


def vtrace(episodes: list[Episode], config) -> torch.Tensor:
    """Compute targets by the recursion in remark 1 of the paper, in Python numbers, then one term per action."""
    terms = []
    for e in episodes:
        actions, per_token = actions_of(e, config), torch.zeros(len(e["logprobs"]), dtype=torch.float64)
        next_vs = next_value = 0.0
        for start, end, log_rho in reversed(actions):
            rho, value, last = math.exp(log_rho), e["values"][start].item(), end == len(e["logprobs"])
            between_turns = bool(e["turn_end"][end - 1])
            gamma = 0.0 if last else config.gamma if between_turns else 1.0
            lam = config.lam if between_turns else 1.0
            reward = rewards_of(e, config)[start:end].sum().item()
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
    return aggregate(terms, config, kept_tokens(episodes, config))


def ppo(episodes: list[Episode], config) -> torch.Tensor:
    """Compute advantages as the sum of all later temporal differences, in O(T^2); an action is a token or a turn."""
    terms = []
    for e in episodes:
        actions, per_token = actions_of(e, config), torch.zeros(len(e["logprobs"]), dtype=torch.float64)
        values, rewards, decays = [e["values"][start].item() for start, _, _ in actions] + [0.0], [], []
        for start, end, _ in actions:
            between_turns = bool(e["turn_end"][end - 1])
            rewards.append(rewards_of(e, config)[start:end].sum().item())
            decays.append((config.gamma, config.lam) if between_turns else (1.0, 1.0))
        for i, (start, end, _) in enumerate(actions):
            advantage, decay = 0.0, 1.0
            for k in range(i, len(actions)):
                advantage += decay * (rewards[k] + decays[k][0] * values[k + 1] - values[k])
                decay *= decays[k][0] * decays[k][1]

            def of_action(log_ratios, start=start, end=end):
                total = log_ratios[start:end].sum()
                return total if config.turn_ratio == "product" else total / (end - start)

            ratio, weight = ratio_and_weight(e, config, of_action)
            # Each token of a turn gets the gradient ratio x A of the turn's ratio, as in V-trace by turns.
            share = (end - start) if config.turn_ratio == "geometric" else 1
            policy = -share * weight * surrogate(ratio, torch.tensor(advantage, dtype=torch.float64), config)
            error = e["values"][start] - (values[i] + advantage)
            per_token[start] = policy + (end - start) * config.value_coef * 0.5 * error**2
        terms.append(per_token)
    return aggregate(terms, config, kept_tokens(episodes, config))


def extras(episodes: list[Episode], config) -> torch.Tensor:
    """Compute the terms of the KL to the reference and of the entropy; the objective is the sum of this and one of the
    above."""
    terms = []
    for e in episodes:
        log_ratio = e["logprobs"] - e["reference"]
        kl = {"k2": 0.5 * log_ratio**2, "k3": (-log_ratio).exp() - 1 + log_ratio}[config.kl_estimator]
        coef = 0.0 if config.kl_in_reward else config.kl_coef
        terms.append(coef * kl - config.entropy_coef * e["entropies"])
    return aggregate(terms, config, kept_tokens(episodes, config))


def sft(episodes: list[Episode], config) -> torch.Tensor:
    return aggregate([-e["logprobs"] for e in episodes], config, kept_tokens(episodes, config))


def sapo(episodes: list[Episode], config) -> torch.Tensor:
    """Differentiate the paper's 4/tau sigmoid(tau (ratio - 1)) A itself."""
    terms = []
    for e in episodes:
        limit = math.inf if config.pg_rho_bar is None else config.pg_rho_bar
        start, weight = e["behaviour"], torch.ones_like(e["behaviour"])
        if config.proximal == "learner":
            start, weight = e["proximal"], (e["proximal"] - e["behaviour"]).exp().clamp(max=limit)
        ratio = (e["logprobs"] - start).exp()
        tau = config.sapo_tau_positive if e["advantage"][0] > 0 else config.sapo_tau_negative
        terms.append(-weight * 4 / tau / (1 + (-tau * (ratio - 1)).exp()) * e["advantage"])
    return aggregate(terms, config, kept_tokens(episodes, config))


def dppo(episodes: list[Episode], config) -> torch.Tensor:
    """Keep a token unless its probability has moved beyond the bound in the direction in which its advantage pushes."""
    terms = []
    for e in episodes:
        start = e["proximal"] if config.proximal == "learner" else e["behaviour"]
        limit = math.inf if config.pg_rho_bar is None else config.pg_rho_bar
        term = torch.zeros(len(start), dtype=torch.float64)
        for t in range(len(start)):
            advantage = e["advantage"][t].item()
            moved = math.exp(e["logprobs"][t].item()) - math.exp(start[t].item())
            if moved <= config.divergence_bound if advantage > 0 else moved >= -config.divergence_bound:
                weight = min(math.exp((e["logprobs"][t] - start[t]).item()), math.inf)
                of_start = math.exp((start[t] - e["behaviour"][t]).item())
                weight = weight * min(of_start, limit) if config.proximal == "learner" else min(weight, limit)
                term[t] = -weight * advantage * e["logprobs"][t]
        terms.append(term)
    return aggregate(terms, config, kept_tokens(episodes, config))


REFERENCES = {
    "vtrace": vtrace,
    "ppo": ppo,
    "grpo": grpo,
    "dr_grpo": grpo,  # it differs in what divides the sum of the terms
    "reinforce++": grpo,  # it differs in the advantages
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "dppo": dppo,
    "sft": sft,
}


def whitened(advantages: list[float], lengths: list[int], floor: float = 0.0) -> list[float]:
    """Return episodes' advantages less their mean over all tokens, divided by their deviation."""
    of_tokens = [a for a, count in zip(advantages, lengths, strict=True) for _ in range(count)]
    mean = sum(of_tokens) / len(of_tokens)
    deviation = math.sqrt(sum((a - mean) ** 2 for a in of_tokens) / len(of_tokens))
    return [(a - mean) / max(deviation, floor) for a in advantages]


def turn_advantages(
    rewards: list[list[float]],
    states: list[list[str]],
    *,
    gamma: float,
    divide: bool = True,
    leave_one_out: bool = False,
    floor: float = 0.0,
) -> list[list[float]]:
    """Return the step advantages of GiGPO (Feng et al., 2025): each turn's discounted return, less the mean over all
    turns of the group that were played in its state; "" is no state."""
    returns = [[sum(gamma ** (k - t) * e[k] for k in range(t, len(e))) for t in range(len(e))] for e in rewards]
    advantages = []
    for of_episode, seen in zip(returns, states, strict=True):
        own = []
        for value, state in zip(of_episode, seen, strict=True):
            alike = [
                r for rs, ss in zip(returns, states, strict=True) for r, s in zip(rs, ss, strict=True) if s == state
            ]
            if not state or len(alike) < 2 or len(set(alike)) == 1:
                own.append(0.0)
                continue
            mean = sum(alike) / len(alike)
            deviation = math.sqrt(sum((r - mean) ** 2 for r in alike) / len(alike))
            others = (sum(alike) - value) / (len(alike) - 1)
            own.append((value - (others if leave_one_out else mean)) / (max(deviation, floor) if divide else 1.0))
        advantages.append(own)
    return advantages
