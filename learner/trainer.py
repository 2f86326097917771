"""A step: groups -> episodes -> updates (packed microbatches -> loss -> gradient -> AdamW), equal on any ranks.

Shape suffixes: N = sampled tokens of one microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from learner.advantages import RunningScale
from learner.batch import Episode, Microbatch, cut, empty_microbatch, make_episodes, pack, plan, plan_together
from learner.distributed import Ranks, all_sum
from learner.images import ImageDecoder
from learner.metrics.episodes import group_metrics
from learner.metrics.throughput import Clock, speed
from learner.metrics.tokens import TokenStats, loss_columns
from learner.model.expert_load import RouterLoad
from learner.model.policy import Policy, PolicyOutput
from learner.model.sharding import copy_weights
from learner.model.sizes import sizes_of
from learner.objective.objectives import loss_of
from learner.objective.records import Tokens
from learner.objective.survey import Survey
from learner.optim import clip_, global_norm, local_gradients, lr_factor, make_optimizer, set_learning_rates
from shared.learner_config import LearnerConfig
from shared.types import Group, PolicyVersion


@dataclass(slots=True)
class Work:
    """What one step's updates share, and what they add up."""

    version: PolicyVersion  # of the policy as the step begins
    scale: float  # of V-trace's advantages
    clock: Clock
    stats: TokenStats
    flops: float = 0.0  # of this rank's updates
    num_microbatches: int = 0
    norms: list[list[float]] = field(default_factory=list)  # of each update's gradient in parts, before any clip
    num_bad: int = 0  # updates without a finite loss and gradient
    num_skipped: int = 0  # updates that changed no weight


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
        """`reference`: the frozen initial policy, sharded as `policy` is; needed where the KL's weight is not 0. Its
        weights become the policy's every `kl_reference_every` steps."""
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
        self._survey = Survey.of(config.objective)
        # A critic on detached states is clipped by itself: it moves nothing but itself, and scales nothing down either.
        self._apart = frozenset(policy.value_head.parameters()) if policy.listener else frozenset()

    def step(self, groups: Sequence[Group], version: PolicyVersion) -> dict[str, float]:
        """Trains on `groups`; `version` is the policy's now. Returns the metrics, the same on every rank.

        There are `passes` times `minibatches` updates. Ratios and the critic's targets are computed anew in each, so
        that later ones are corrected as stale data is; metrics are of the tokens of all updates. An update without a
        trainable token, or with a non-finite loss or gradient, changes no weight, and its step is counted.
        """
        objective = self.config.objective
        clock = Clock(self.ranks.device)
        episodes = make_episodes(groups, self.decoder, objective)
        work = Work(version, self.scale(episodes), clock, TokenStats(self.ranks.device))
        factor = lr_factor(self.num_steps, self.config)
        set_learning_rates(self.optimizer, factor)
        clock.lap("prepare")
        if episodes and (self._survey.policy or self._survey.reference):
            episodes = self._surveyed(episodes, work)
        for chosen in cut(len(episodes), objective.passes, objective.minibatches, seed=self.num_steps):
            self._update([episodes[i] for i in chosen], work)
        self.num_steps += 1
        self.num_skipped += work.num_skipped > 0
        self.num_bad_in_a_row = self.num_bad_in_a_row + 1 if work.num_bad else 0
        work.stats.gather(self.ranks)
        metrics = work.stats.metrics() | self.router.metrics(self.ranks)
        self.scale.follow(metrics.get("policy/advantage_rms", 0.0))
        if objective.kl_reference_every and self.num_steps % objective.kl_reference_every == 0:
            assert self.reference is not None
            copy_weights(self.policy, self.reference)
        clock.lap("optimizer")
        largest = np.max(work.norms, axis=0).tolist()
        metrics |= {"optim/grad_norm": largest[0], "optim/lr": self.config.optimizer.lr * factor}
        if self._apart:
            metrics["optim/value_grad_norm"] = largest[1]
        metrics["optim/skipped_steps"] = float(self.num_skipped)
        metrics["optim/bad_steps_in_a_row"] = float(self.num_bad_in_a_row)
        return metrics | group_metrics(groups, version, self.config) | self._work_done(episodes, work)

    def _work_done(self, episodes: list[Episode], work: Work) -> dict[str, float]:
        flops = float(all_sum(torch.tensor(work.flops, dtype=torch.float64, device=self.ranks.device), self.ranks))
        num_tokens, num_sampled = sum(e.num_tokens for e in episodes), sum(len(e.targets) for e in episodes)
        metrics = work.clock.metrics() | speed(flops, work.clock.total, self.ranks)
        metrics |= {"batch/episodes": float(len(episodes)), "batch/sampled_tokens": float(num_sampled)}
        metrics |= {"batch/tokens": float(num_tokens), "batch/microbatches": float(work.num_microbatches)}
        metrics["speed/tokens_per_s"] = num_tokens / max(work.clock.total, 1e-9)
        return metrics

    def _flops(self, batch: Microbatch) -> float:
        """Of forward and backward; 0 for a model whose sizes are not known."""
        if self._sizes is None or batch.empty:
            return 0.0
        return 3 * self._sizes.forward_flops(batch.lengths, batch.image_lengths, batch.num_tokens)

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds besides parameters and optimizer."""
        own = {"num_steps": self.num_steps, "num_skipped": self.num_skipped, "advantage_moment": self.scale.moment}
        return own | ({"has_reference": True} if self.config.objective.kl_reference_every else {})

    def load_state(self, state: dict[str, Any]) -> None:
        self.num_steps, self.num_skipped = state["num_steps"], state["num_skipped"]
        self.scale.moment = state["advantage_moment"]

    # ------------------------------------------------------------------ what a step is made of

    @torch.no_grad()
    def _surveyed(self, episodes: list[Episode], work: Work) -> list[Episode]:
        """The episodes with what policy and reference say of them as the step begins, on every rank."""
        asked = [(0, self.policy)] if self._survey.policy else []
        asked += [(1, self.reference)] if self._survey.reference and self.reference is not None else []
        starts = np.cumsum([0, *(len(e.targets) for e in episodes)])
        logprobs = torch.zeros(2, int(starts[-1]), device=self.ranks.device)
        self.router.counting = False
        for chosen in self._plan(episodes):
            order = sorted(chosen, key=lambda i: episodes[i].num_tokens)  # as `pack` has them
            batch = self._pack([episodes[i] for i in order])
            places = [torch.arange(starts[i], starts[i + 1], device=self.ranks.device) for i in order]
            for row, policy in asked:
                found_N = policy(batch, self.temperature).logprobs
                if places:
                    logprobs[row, torch.cat(places)] = found_N
        found = self._survey.added(episodes, all_sum(logprobs, self.ranks).cpu().numpy(), self.config.objective)
        work.clock.lap("forward")
        return found

    def _update(self, episodes: list[Episode], work: Work) -> None:
        """One gradient of `episodes`, applied."""
        num_tokens = sum(len(e.targets) for e in episodes)
        divisor = max(len(episodes) if self._per_episode else num_tokens, 1)
        microbatches = self._plan(episodes)
        work.num_microbatches += len(microbatches)
        sums = torch.zeros(2, dtype=torch.float64, device=self.ranks.device)  # of losses; of weights that are dropped
        self.optimizer.zero_grad()
        work.clock.lap("prepare")
        for chosen in microbatches:
            batch = self._pack([episodes[i] for i in chosen])
            work.flops += self._flops(batch)
            work.clock.lap("prepare")
            self.router.counting = not batch.empty
            output = self.policy(batch, self.temperature)
            loss, weight = self._loss(batch, output, divisor, work)
            sums += torch.stack([loss.detach(), weight])
            work.clock.lap("forward")
            loss.backward()
            work.clock.lap("backward")
        total, lost = all_sum(sums, self.ranks).tolist()
        kept = 1.0 - lost / divisor
        self._apply(work, kept if num_tokens else 0.0, sound=bool(np.isfinite(total)))
        work.clock.lap("optimizer")

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

    def _loss(self, batch: Microbatch, output: PolicyOutput, divisor: int, work: Work) -> tuple[Tensor, Tensor]:
        """This microbatch's share of the update's loss, to be differentiated, and the weight of what it drops."""
        objective, reference = self.config.objective, batch.reference_logprobs
        if self.reference is not None and not self._survey.reference:
            with torch.no_grad():
                reference = self.reference(batch, self.temperature).logprobs
        unused = 0.0 * (output.logprobs.sum() + output.entropies.sum() + output.values.sum())
        if batch.empty:
            return unused, torch.zeros_like(unused)
        proximal = None
        if objective.proximal == "learner":  # in a step's only update the policy is still what it was
            proximal = batch.proximal_logprobs if self._survey.policy else output.logprobs.detach()
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
            proximal_logprobs=proximal,
        )
        loss = loss_of(tokens, objective, work.scale)
        work.stats.add(work.version - batch.versions, loss_columns(tokens, loss))
        lost = torch.zeros_like(unused) if loss.dropped is None else (tokens.weights * loss.dropped.any_N).sum()
        return loss.total / divisor + unused, lost  # every output is in every backward, as the other ranks have it

    def _apply(self, work: Work, kept: float, *, sound: bool) -> None:
        """Clips and applies the gradient, unless it or the loss is not finite or there is none. `kept`: the share that
        was not dropped of the weights that it was divided by."""
        parts = local_gradients(self.optimizer, self._apart)
        for gradients in parts:
            if gradients and 0.0 < kept < 1.0:
                torch._foreach_div_(gradients, kept)
        norms = [float(global_norm(gradients, self.ranks)) for gradients in parts]
        work.norms.append(norms)
        sound = sound and bool(np.isfinite(norms).all())
        work.num_bad += not sound
        if kept <= 0.0 or not sound:
            work.num_skipped += 1
        else:
            for gradients, norm in zip(parts, norms, strict=True):
                clip_(gradients, norm, self.config.optimizer.max_grad_norm)
            self.optimizer.step()
        self.optimizer.zero_grad()
