"""A training step: plan, prefetch, then for each update forward and loss, backward, apply; equal on any ranks.

groups ─▶ plan_step ─▶ delivered_images ─▶ prefetch ─▶ precompute_logprobs ─▶ make_update, one after the other
          (episodes,   (to the ranks that  (packed by   (if the objective      (forward, loss, backward, clip,
           bins)        decode them)        a thread)    needs it)              optimizer)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from learner.batch.delivery import delivered_images
from learner.batch.episodes import episode_rewards, make_episodes
from learner.batch.image_decoder import ImageDecoder
from learner.batch.microbatch import Microbatch
from learner.batch.packer import Packer
from learner.batch.prefetch import prefetch
from learner.batch.step_plan import StepPlan, plan_step
from learner.batch.to_device import on
from learner.batch.update_plan import has_no_loss
from learner.distributed import Ranks, all_sum, own_part
from learner.metrics.throughput import Clock
from learner.metrics.token_metrics import TokenStats, unused_names, with_observed
from learner.model.expert_load import RouterLoad
from learner.model.lora_reference import BasePolicy
from learner.model.policy import Policy
from learner.model.sharding import copy_weights, layers_alike
from learner.objective.advantages import RunningScale, moments_of_returns
from learner.recording.recorded_columns import RecordedColumns
from learner.training.guard_state import GuardState
from learner.training.image_gain import image_gain
from learner.training.models import Beforehand, Models
from learner.training.optim import lr_factor, make_optimizer, set_learning_rates
from learner.training.precomputed import PrecomputedColumns, precompute_logprobs, precompute_teacher
from learner.training.step_totals import StepTotals
from learner.training.update import make_update, observe, policy_divergence
from shared.config.learner_section import LearnerConfig
from shared.families.registry import sizes_of
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
        reference: Policy | BasePolicy | None = None,
        teacher: Policy | None = None,
    ) -> None:
        """Make the optimizer of a policy.

        `reference`: the frozen initial policy, sharded as `policy` is; required if and only if the KL or the hold has a
        weight. Its weights are replaced by the policy's every `kl_reference_every` steps. `teacher`: frozen and sharded
        likewise; required if and only if the objective has one. Raise ValueError if the reference or the teacher is
        missing or not needed, or if the temperature is not positive.
        """
        if temperature <= 0:
            raise ValueError(f"sampling.temperature = {temperature}: training needs a temperature above 0")
        weights = {name: getattr(config.objective, name) for name in ("kl_coef", "hold_coef")}
        if config.objective.has_reference != (reference is not None):
            raise ValueError(
                f"learner.objective: {weights} and {'a' if reference else 'no'} reference policy do not fit"
            )
        if config.objective.has_teacher != (teacher is not None):
            raise ValueError(
                f"learner.objective.teacher = {config.objective.teacher!r} and the given teacher do not fit"
            )
        self.policy = policy.train()
        self.reference = reference
        self.config = config
        self.ranks = ranks
        self.optimizer = make_optimizer(policy, config.optimizer, config.policy_lr)
        self.decoder = ImageDecoder(policy.spec)
        self.packer = Packer(
            self.decoder, policy.banned_ids, ranks.device, ranks.context, config.parallel.share_prefixes
        )
        self.models = Models(
            policy,
            reference,
            config,
            ranks,
            temperature,
            sizes=sizes_of(policy.vlm.config.to_dict()),
            router=RouterLoad(policy.vlm, ranks.device),
            beforehand=Beforehand.needed_by(config.objective),
            teacher=teacher,
        )
        self.num_steps = 0
        self.num_skipped = 0
        self.guard = GuardState()
        self.scale = RunningScale(config.objective)
        self._compared = False  # True once policy and reference were compared after weights were loaded
        # A critic on detached states trains only itself, so its gradient is clipped separately and does not scale
        # others down.
        self._separate = frozenset(policy.value_head.parameters()) if policy.has_deep_critic else frozenset()

    def step(
        self, groups: Sequence[Group], version: PolicyVersion, recorded: RecordedColumns | None = None
    ) -> dict[str, float]:
        """Train on `groups`; `version` is the policy's version now. Return the metrics, the same on every rank.
        `recorded` then has its columns.

        There are `passes` times `minibatches` updates. Each computes ratios and the critic's targets anew, so that
        later updates are corrected like stale data; metrics cover the tokens of all updates. Once the policy has moved
        by `guard.max_kl`, the remaining updates are skipped. An update without a trainable token, or with a loss or
        gradient that is not finite, changes no weight, but its step counts.
        """
        config, ranks, models = self.config, self.ranks, self.models
        clock = Clock(ranks.device)
        self._compare()
        objective = config.objective
        rewards = [reward for group in groups for reward in episode_rewards(group, objective)]
        plan = plan_step(
            groups,
            self.decoder,
            config,
            ranks,
            models.sizes,
            seed=self.num_steps,
            noise=self.scale.reward_noise(rewards),
            beforehand=models.beforehand.is_needed,
            taught=models.teacher is not None,
            looked_at=frozenset() if recorded is None else recorded.indices,
        )
        scaling = self.scale(plan.episodes).on(ranks.device)
        stats, observed = TokenStats(ranks.device), TokenStats(ranks.device)
        totals = StepTotals(version, scaling, clock, stats, observed, PrecomputedColumns(), recorded)
        factor, policy_factor = lr_factor(self.num_steps, config), scaling.rate * self.guard.brake
        set_learning_rates(self.optimizer, factor, policy_factor)
        images_of = partial(plan.images_of, context_size=ranks.context.size, decoder=self.decoder)
        with delivered_images(images_of, ranks, self.decoder):
            clock.lap("prepare")
            microbatches = [chosen for part in plan.parts for chosen in part.microbatches]
            with prefetch(self.packer.pack, microbatches, ranks.device) as batches:
                looked = self._before_updates(plan, batches, totals)
                for number, update in enumerate(plan.updates):
                    if not make_update(update, batches, models, self.optimizer, totals, separate=self._separate):
                        totals.num_left_out = len(plan.updates) - number
                        break
            metrics = self._finish(totals, plan) | looked
            metrics |= self._measure_move(totals, metrics)
        totals.num_blank = self.decoder.take_num_blank()
        clock.lap("forward")
        clock.record_spans()
        metrics["optim/lr"] = config.policy_lr * factor * policy_factor
        metrics["optim/rate"] = scaling.rate
        if models.teacher is not None:
            hinted = [bool(t.hints) for group in groups for t in group.trajectories if t.trainable]
            metrics["teacher/hinted"] = sum(hinted) / max(len(hinted), 1)
        return metrics | totals.metrics(plan.episodes, ranks)

    def start_critic(self, groups: Sequence[Group]) -> None:
        """Let a new critic predict the mean return of `groups`, before the first step on them.

        A constant added to all rewards then changes nothing; a critic that begins at 0 would have to learn it first,
        and the policy would wait for it.
        """
        objective = self.config.objective
        if self.num_steps or not objective.has_critic:
            return
        episodes = make_episodes(groups, self.decoder, objective)
        count, total, _ = moments_of_returns(episodes, objective.gamma).sum(0).tolist()
        self.scale.start_value = total / count if count else 0.0
        with torch.no_grad():
            bias = self.policy.value_head.bias
            assert isinstance(bias, Tensor)
            own_part(bias).fill_(self.scale.start_value)

    def state(self) -> dict[str, Any]:
        """Return the trainer's part of a checkpoint besides parameters and optimizer."""
        state = {"num_steps": self.num_steps, "num_skipped": self.num_skipped, **self.scale.state()}
        state["guard"] = asdict(self.guard)
        return state | ({"has_reference": True} if self.config.objective.kl_reference_every else {})

    def load_state(self, state: dict[str, Any]) -> None:
        """Load a result of `state`; an older checkpoint may lack the guards' part."""
        self.num_steps, self.num_skipped = state["num_steps"], state["num_skipped"]
        self.scale.load_state(state)
        self.guard = GuardState(**state.get("guard", {}))
        self._compared = False

    # ------------------------------------------------------------------ before and after the updates

    def _before_updates(self, plan: StepPlan, batches: Iterator[Microbatch], totals: StepTotals) -> dict[str, float]:
        """Compute the plan's parts before its updates, from the first of its microbatches; return the metrics of the
        episodes that are looked at under other images. A collective."""
        models, clock, metrics = self.models, totals.clock, dict[str, float]()
        if plan.beforehand is not None:
            first = islice(batches, len(plan.beforehand.microbatches))
            totals.precomputed = precompute_logprobs(plan.episodes, first, models)
            clock.lap("forward")
        if plan.taught is not None:
            if plan.beforehand is None:
                totals.precomputed = PrecomputedColumns(plan.episodes)
            read = islice(batches, len(plan.taught.microbatches))
            precompute_teacher(totals.precomputed, plan.episodes, read, models)
            clock.lap("forward")
        if plan.observed is not None:
            observe(islice(batches, len(plan.observed.microbatches)), models, totals)
            clock.lap("forward")
        if plan.looked_at is not None:
            metrics = image_gain(islice(batches, len(plan.looked_at.microbatches)), models)
            clock.lap("forward")
        return metrics

    def _compare(self) -> None:
        """Compare policy and reference before the first step after weights were loaded. Layers that are frozen and
        equal stay equal."""
        if self.reference is not None and not self._compared:
            self.models.num_common = layers_alike(self.policy, self.reference, self.ranks)
        self._compared = True

    def _finish(self, totals: StepTotals, plan: StepPlan) -> dict[str, float]:
        """Count the step and update running moments and the reference; return metrics of the step's tokens, experts and
        gradients."""
        self.num_steps += 1
        self.num_skipped += totals.num_skipped > 0
        self.guard.bad_steps = self.guard.bad_steps + 1 if totals.num_bad else 0
        totals.stats.gather(self.ranks)
        if totals.recorded is not None:
            totals.recorded.gather(self.ranks)
        unused = unused_names(self.config.objective)
        metrics = {name: value for name, value in totals.stats.metrics().items() if not name.startswith(unused)}
        if plan.observed is not None:
            totals.observed.gather(self.ranks)
            left_out = sum(e.num_sampled for e in plan.episodes if has_no_loss(e, self.config))
            total = sum(e.num_sampled for e in plan.episodes)
            metrics = with_observed(metrics, totals.observed.metrics(), left_out / total)
        metrics |= self.models.router.metrics(self.ranks)
        self.scale.follow(totals.stats.moments())
        every = self.config.objective.kl_reference_every
        if every and self.num_steps % every == 0:
            assert isinstance(self.reference, Policy)
            copy_weights(self.policy, self.reference)
        totals.clock.lap("optimizer")
        largest = np.max(totals.norms, axis=0).tolist()
        metrics["optim/grad_norm"] = largest[0]
        if self._separate:
            metrics["optim/value_grad_norm"] = largest[1]
        metrics["optim/skipped_steps"] = float(self.num_skipped)
        metrics["optim/bad_steps_in_a_row"] = float(self.guard.bad_steps)
        return metrics

    def _measure_move(self, totals: StepTotals, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return metrics for the guards: the number of skipped updates, and how far the step has moved the policy.

        The latter is measured only if tokens of older versions will not show it; it costs a forward of the last
        update's probe. A collective.
        """
        values = {"guard/updates_left_out": float(totals.num_left_out)}
        is_shown = any(name.startswith("tokens/lag_") and name != "tokens/lag_0" for name in metrics)
        if not self.config.guard.max_kl or is_shown or totals.last is None or not totals.last.microbatches:
            return values
        batch = totals.precomputed.add_to(on(self.packer.pack(totals.last.probe), self.ranks.device))
        sums = policy_divergence(batch, self.models.policy_logprobs(batch), self.ranks)
        total, count = all_sum(torch.stack(sums).double(), self.ranks).tolist()
        return values | {"guard/kl_step": total / max(count, 1.0)}
