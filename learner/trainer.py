"""One optimizer step: groups -> episodes -> packed microbatches -> loss -> gradient -> AdamW, equal on any ranks.

Shape suffixes: N = sampled tokens of one microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from learner.advantages import RunningScale
from learner.batch import Episode, Microbatch, empty_microbatch, make_episodes, pack, plan, plan_together
from learner.distributed import Ranks, all_sum
from learner.images import ImageDecoder
from learner.metrics.throughput import Clock, speed
from learner.metrics.tokens import TokenStats, loss_columns
from learner.model.expert_load import RouterLoad
from learner.model.policy import Policy, PolicyOutput
from learner.model.sizes import sizes_of
from learner.objectives import OBJECTIVES, Tokens, corrected
from learner.optim import clip_, global_norm, local_gradients, lr_factor, make_optimizer, set_learning_rates
from shared.learner_config import LearnerConfig
from shared.types import Group, PolicyVersion


class Trainer:
    """The policy with its optimizer. `step` is a collective: every rank calls it with the same groups."""

    def __init__(
        self,
        policy: Policy,
        config: LearnerConfig,
        ranks: Ranks,
        *,
        temperature: float = 1.0,
        reference: Policy | None = None,
    ) -> None:
        """`reference`: the frozen initial policy, sharded as `policy` is; needed where the KL's weight is not 0."""
        if temperature <= 0:
            raise ValueError(f"sampling.temperature = {temperature}: training needs a temperature above 0")
        kl_coef = config.objective.kl_coef
        if (kl_coef != 0) != (reference is not None):
            raise ValueError(
                f"learner.objective.kl_coef = {kl_coef} and {reference and 'a'} reference policy do not fit"
            )
        self.policy = policy.train()
        self.reference = reference
        self.config = config
        self.ranks = ranks
        self.temperature = temperature
        self.optimizer = make_optimizer(policy, config.optimizer)
        self.decoder = ImageDecoder(policy.spec)
        self.num_steps = 0
        self.num_skipped = 0
        self.num_bad_in_a_row = 0  # steps without a finite loss and gradient
        self.scale = RunningScale(config.objective)
        self.router = RouterLoad(policy.vlm, ranks.device)
        self._sizes = sizes_of(policy.vlm.config.to_dict())
        self._per_episode = config.objective.aggregation == "sequence_mean"

    def step(self, groups: Sequence[Group], version: PolicyVersion) -> dict[str, float]:
        """Trains once on `groups`; `version` is the policy's now. Returns the metrics, the same on every rank.

        A step without a trainable token, or with a non-finite loss or gradient, changes no weight and is counted.
        """
        clock = Clock(self.ranks.device)
        episodes = make_episodes(groups, self.decoder, self.config.objective)
        num_tokens = sum(len(e.targets) for e in episodes)
        microbatches = self._plan(episodes)
        scale = self.scale(episodes)
        divisor = max(len(episodes) if self._per_episode else num_tokens, 1)
        clock.lap("prepare")
        stats = TokenStats(self.ranks.device)
        flops = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        self.optimizer.zero_grad()
        for chosen in microbatches:
            batch = self._pack([episodes[i] for i in chosen])
            flops += self._flops(batch)
            clock.lap("prepare")
            self.router.counting = not batch.empty
            output = self.policy(batch, self.temperature)
            loss = self._loss(batch, output, version, divisor, scale, stats)
            clock.lap("forward")
            loss.backward()
            clock.lap("backward")
        all_sum(stats.sums, self.ranks)
        all_sum(flops, self.ranks)
        metrics = stats.metrics() | self.router.metrics(self.ranks)
        norm, lr = self._update(num_tokens, sound=bool(np.isfinite(metrics.get("loss/policy", 0.0))))
        self.scale.follow(metrics.get("policy/advantage_rms", 0.0))
        clock.lap("optimizer")
        lengths = [e.num_tokens for e in episodes]
        metrics |= clock.metrics() | speed(float(flops), clock.total, self.ranks)
        metrics |= {"optim/grad_norm": norm, "optim/lr": lr, "optim/skipped_steps": float(self.num_skipped)}
        metrics["optim/bad_steps_in_a_row"] = float(self.num_bad_in_a_row)
        metrics |= {"batch/episodes": float(len(episodes)), "batch/sampled_tokens": float(num_tokens)}
        metrics |= {"batch/tokens": float(sum(lengths)), "batch/microbatches": float(len(microbatches))}
        metrics["speed/tokens_per_s"] = sum(lengths) / max(clock.total, 1e-9)
        return metrics

    def _flops(self, batch: Microbatch) -> float:
        """Of forward and backward; 0 for a model whose sizes are not known."""
        if self._sizes is None or batch.empty:
            return 0.0
        return 3 * self._sizes.forward_flops(batch.lengths, batch.image_lengths, batch.num_tokens)

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds besides parameters and optimizer."""
        return {"num_steps": self.num_steps, "num_skipped": self.num_skipped, "advantage_moment": self.scale.moment}

    def load_state(self, state: dict[str, Any]) -> None:
        self.num_steps, self.num_skipped = state["num_steps"], state["num_skipped"]
        self.scale.moment = state["advantage_moment"]

    # ------------------------------------------------------------------ what a step is made of

    def _plan(self, episodes: list[Episode]) -> list[list[int]]:
        """This rank's microbatches. Episodes whose loss is exactly 0 take no part; the token count still has them."""
        useful = list(range(len(episodes)))
        config, objective = self.config, self.config.objective
        if objective.group_relative and objective.entropy_coef == 0 and objective.kl_coef == 0:
            useful = [i for i in useful if episodes[i].advantage != 0.0]
        if not useful:
            return []  # on every rank
        lengths = [episodes[i].num_tokens for i in useful]
        place = plan if config.group_size == 1 else plan_together
        mine = place(lengths, self.ranks.size, config.parallel.microbatch_tokens)[self.ranks.rank]
        return [[useful[i] for i in chosen] for chosen in mine]

    def _pack(self, episodes: list[Episode]) -> Microbatch:
        if episodes:
            return pack(episodes, self.decoder, self.ranks.device)
        banned = self.policy.banned_ids
        harmless_id = next(i for i in range(len(banned) + 1) if i not in banned)
        return empty_microbatch(self.decoder, harmless_id, self.ranks.device)

    def _loss(
        self, batch: Microbatch, output: PolicyOutput, version: int, divisor: int, scale: float, stats: TokenStats
    ) -> Tensor:
        """The scalar to differentiate: this microbatch's share of the step's loss."""
        reference = None
        if self.reference is not None:
            with torch.no_grad():
                reference = self.reference(batch, self.temperature).logprobs
        unused = 0.0 * (output.logprobs.sum() + output.entropies.sum() + output.values.sum())
        if batch.empty:
            return unused
        tokens = Tokens(
            logprobs=output.logprobs,
            entropies=output.entropies,
            values=output.values,
            behaviour_logprobs=batch.behaviour_logprobs,
            rewards=batch.rewards,
            turn_end=batch.turn_end,
            episode_end=batch.episode_end,
            advantages=batch.advantages,
            weights=1.0 / batch.episode_tokens if self._per_episode else torch.ones_like(batch.episode_tokens),
            reference_logprobs=reference,
        )
        objective = self.config.objective
        loss = OBJECTIVES[objective.name](corrected(tokens, objective), objective, scale)
        stats.add(version - batch.versions, loss_columns(tokens, loss))
        return loss.total / divisor + unused  # every output is in every backward, as the other ranks have it

    def _update(self, num_tokens: int, *, sound: bool) -> tuple[float, float]:
        """Clips and applies the gradient, unless it or the loss is not finite or there is none: (norm, rate)."""
        factor = lr_factor(self.num_steps, self.config)
        gradients = local_gradients(self.optimizer)
        norm = float(global_norm(gradients, self.ranks))
        self.num_steps += 1
        sound = sound and bool(np.isfinite(norm))
        self.num_bad_in_a_row = 0 if sound else self.num_bad_in_a_row + 1
        if num_tokens == 0 or not sound:
            self.num_skipped += 1
        else:
            clip_(gradients, norm, self.config.optimizer.max_grad_norm)
            set_learning_rates(self.optimizer, factor)
            self.optimizer.step()
        self.optimizer.zero_grad()
        return norm, self.config.optimizer.lr * factor
