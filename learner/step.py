"""One optimizer step: groups -> episodes -> packed microbatches -> loss -> gradient -> AdamW, equal on any ranks.

Shape suffixes: N = sampled tokens of one microbatch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from learner.batch import Episode, EpisodeSettings, Microbatch, empty_microbatch, make_episodes, pack, plan
from learner.dist import Ranks, all_sum
from learner.model import Policy, PolicyOutput
from learner.objectives import Loss, grpo_loss, vtrace_loss
from learner.optim import clip_, global_norm, local_gradients, lr_factor, make_optimizer, set_learning_rates
from learner.pictures import Pictures
from learner.stats import TokenStats
from learner.vtrace import token_vtrace
from shared.config import LearnerConfig
from shared.types import Group, PolicyVersion


class Trainer:
    """The policy with its optimizer. `step` is a collective: every rank calls it with the same groups."""

    def __init__(self, policy: Policy, config: LearnerConfig, ranks: Ranks, *, temperature: float = 1.0) -> None:
        if temperature <= 0:
            raise ValueError(f"sampling.temperature = {temperature}: training needs a temperature above 0")
        self.policy = policy.train()
        self.config = config
        self.ranks = ranks
        self.temperature = temperature
        self.optimizer = make_optimizer(policy, config)
        self.pictures = Pictures(policy.spec)
        self.num_steps = 0
        self.num_skipped = 0
        self.advantage_moment = 0.0  # running mean of squared advantages; 0 before the first step

    def step(self, groups: Sequence[Group], version: PolicyVersion) -> dict[str, float]:
        """Trains once on `groups`; `version` is the policy's now. Returns the metrics, the same on every rank.

        A step without a trainable token, or with a non-finite loss or gradient, changes no weight and is counted.
        """
        clock = Clock()
        episodes = make_episodes(groups, self.pictures, self._episode_settings())
        num_tokens = sum(len(e.targets) for e in episodes)
        microbatches = self._plan(episodes)
        scale = self._advantage_scale(episodes)
        clock.lap("prepare")
        stats = TokenStats(self.ranks.device)
        self.optimizer.zero_grad()
        for chosen in microbatches:
            batch = self._pack([episodes[i] for i in chosen])
            clock.lap("prepare")
            output = self.policy(batch, self.temperature)
            loss = self._loss(batch, output, version, max(num_tokens, 1), scale, stats)
            clock.lap("forward")
            loss.backward()
            clock.lap("backward")
        norm, lr = self._update(num_tokens)
        all_sum(stats.sums, self.ranks)
        self._follow_advantages(stats)
        clock.lap("optimizer")
        lengths = [e.num_tokens for e in episodes]
        metrics = stats.metrics() | clock.metrics()
        metrics |= {"optim/grad_norm": norm, "optim/lr": lr, "optim/skipped_steps": float(self.num_skipped)}
        metrics |= {"batch/episodes": float(len(episodes)), "batch/sampled_tokens": float(num_tokens)}
        metrics |= {"batch/tokens": float(sum(lengths)), "batch/microbatches": float(len(microbatches))}
        metrics["speed/tokens_per_s"] = sum(lengths) / max(clock.total, 1e-9)
        return metrics

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds besides parameters and optimizer."""
        names = ("num_steps", "num_skipped", "advantage_moment")
        return {name: getattr(self, name) for name in names}

    def load_state(self, state: dict[str, Any]) -> None:
        self.num_steps, self.num_skipped = state["num_steps"], state["num_skipped"]
        self.advantage_moment = state["advantage_moment"]

    # ------------------------------------------------------------------ what a step is made of

    def _episode_settings(self) -> EpisodeSettings:
        return EpisodeSettings(reward_scale=self.config.reward_scale, turn_rewards=self.config.turn_rewards)

    def _plan(self, episodes: list[Episode]) -> list[list[int]]:
        """This rank's microbatches. Episodes whose loss is exactly 0 take no part; the token count still has them."""
        useful = list(range(len(episodes)))
        if self.config.objective == "grpo" and self.config.entropy_coef == 0:
            useful = [i for i in useful if episodes[i].advantage != 0.0]
        lengths = [episodes[i].num_tokens for i in useful]
        mine = plan(lengths, self.ranks.size, self.config.microbatch_tokens)[self.ranks.rank]
        return [[useful[i] for i in chosen] for chosen in mine]

    def _pack(self, episodes: list[Episode]) -> Microbatch:
        if not episodes:
            return empty_microbatch(self.pictures, self._harmless_id(), self.ranks.device)
        return pack(episodes, self.pictures, self.ranks.device)

    def _harmless_id(self) -> int:
        return next(i for i in range(len(self.policy.banned_ids) + 1) if i not in self.policy.banned_ids)

    def _loss(
        self, batch: Microbatch, output: PolicyOutput, version: int, num_tokens: int, scale: float, stats: TokenStats
    ) -> Tensor:
        """The scalar to differentiate: this microbatch's share of the step's loss."""
        if batch.empty:
            return 0.0 * (output.logprobs.sum() + output.entropies.sum() + output.values.sum())
        config, logprobs = self.config, output.logprobs
        clip = (config.clip_low, config.clip_high)
        shared: dict[str, Any] = {"num_tokens": num_tokens, "entropy_coef": config.entropy_coef}
        shared["max_weight"] = config.pg_rho_bar
        log_rhos = (logprobs - batch.behaviour_logprobs).detach()
        if config.objective == "grpo":
            advantages, vs = batch.advantages, output.values.detach()
            loss = grpo_loss(logprobs, output.entropies, batch.behaviour_logprobs, advantages, clip=clip, **shared)
        else:
            advantages, vs = self._targets(batch, log_rhos, output.values)
            terms = (logprobs, output.entropies, output.values, batch.behaviour_logprobs, advantages * scale, vs)
            used_clip = clip if config.vtrace_clip else None
            loss = vtrace_loss(*terms, clip=used_clip, value_coef=config.value_coef, **shared)
        stats.add(version - batch.versions, _columns(log_rhos, output, loss, advantages, vs))
        unused = 0.0 * output.values.sum()  # keeps the value head in every backward, as the other ranks have it
        return loss.total + unused

    def _targets(self, batch: Microbatch, log_rhos_N: Tensor, values_N: Tensor) -> tuple[Tensor, Tensor]:
        """(advantages not weighted by rho, vs), both [N]."""
        config = self.config
        targets = token_vtrace(
            log_rhos_N,
            batch.rewards,
            values_N.detach(),
            batch.turn_end,
            batch.episode_end,
            gamma=config.gamma,
            lam=config.lam,
            rho_bar=config.rho_bar,
            c_bar=config.c_bar,
            pg_rho_bar=config.pg_rho_bar,
        )
        return targets.advantages, targets.vs

    def _advantage_scale(self, episodes: list[Episode]) -> float:
        """What V-trace advantages are multiplied by: known before the step, hence the same in all microbatches.

        It is 1/sqrt of a running mean of squared advantages; the first step starts it from the returns alone.
        """
        if not self.config.normalize_advantages or self.config.objective != "vtrace" or not episodes:
            return 1.0
        if self.advantage_moment == 0.0:
            rewards = torch.from_numpy(np.concatenate([e.rewards for e in episodes]))
            turn_end = torch.from_numpy(np.concatenate([e.turn_end for e in episodes]))
            episode_end = torch.zeros_like(turn_end)
            episode_end[np.cumsum([len(e.rewards) for e in episodes]) - 1] = True
            zeros = torch.zeros_like(rewards)
            config = self.config
            returns = token_vtrace(zeros, rewards, zeros, turn_end, episode_end, gamma=config.gamma, lam=config.lam)
            moment = float(returns.advantages.double().square().mean())
            self.advantage_moment = moment if np.isfinite(moment) else 0.0
        return 1.0 / max(self.advantage_moment**0.5, 1e-6) if self.advantage_moment > 0 else 1.0

    def _follow_advantages(self, stats: TokenStats) -> None:
        moment = stats.metrics().get("policy/advantage_rms", 0.0) ** 2
        if 0.0 < moment < float("inf"):
            keep = self.config.advantage_memory
            self.advantage_moment = keep * (self.advantage_moment or moment) + (1 - keep) * moment

    def _update(self, num_tokens: int) -> tuple[float, float]:
        """Clips and applies the gradient, unless it is not finite or there is none. Returns (gradient norm, rate)."""
        factor = lr_factor(self.num_steps, self.config)
        gradients = local_gradients(self.optimizer)
        norm = float(global_norm(gradients, self.ranks))
        self.num_steps += 1
        if num_tokens == 0 or not np.isfinite(norm):
            self.num_skipped += 1
        else:
            clip_(gradients, norm, self.config.max_grad_norm)
            set_learning_rates(self.optimizer, factor)
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norm, self.config.lr * factor


def _columns(log_rhos: Tensor, output: PolicyOutput, loss: Loss, advantages: Tensor, vs: Tensor) -> dict[str, Tensor]:
    rhos, error = log_rhos.exp(), vs - output.values.detach()
    return {
        "tokens": torch.ones_like(rhos),
        "abs_gap": log_rhos.abs(),
        "ratio": rhos,
        "ratio_sq": rhos.square(),
        "kl": rhos - 1 - log_rhos,
        "clipped": loss.clipped_N,
        "entropy": output.entropies,
        "policy_loss": loss.policy_N,
        "error": error,
        "error_sq": error.square(),
        "vs": vs,
        "vs_sq": vs.square(),
        "advantage_sq": advantages.square(),
    }


class Clock:
    """Seconds by name, and their sum."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._last
        self._last = now

    @property
    def total(self) -> float:
        return sum(self._seconds.values())

    def metrics(self) -> dict[str, float]:
        return {f"time/{name}_s": seconds for name, seconds in self._seconds.items()}
