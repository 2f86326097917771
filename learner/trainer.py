"""A step: groups -> episodes -> updates (packed microbatches -> loss -> gradient -> AdamW), equal on any ranks.

Shape suffixes: N = sampled tokens of one microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from learner.advantages import RunningScale
from learner.batch import Episode, Microbatch, cut, make_episodes
from learner.distributed import Ranks, all_sum
from learner.guards.state import GuardState
from learner.images import ImageDecoder
from learner.lora.reference import BasePolicy
from learner.metrics.episodes import group_metrics
from learner.metrics.throughput import Clock
from learner.metrics.tokens import TokenStats, loss_columns
from learner.metrics.work import Work
from learner.model.expert_load import RouterLoad
from learner.model.policy import Policy, PolicyOutput
from learner.model.sharding import add_up_replicas, copy_weights, forward_only, layers_alike
from learner.model.sizes import sizes_of
from learner.objective.columns import tokens_of
from learner.objective.objectives import loss_of
from learner.objective.survey import Survey
from learner.optim import clip_, local_gradients, lr_factor, make_optimizer, set_learning_rates, squares
from learner.parallel.collectives import lowest
from learner.parallel.packer import Packer
from learner.recording.columns import Watched, recorded_columns
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
        reference: Policy | BasePolicy | None = None,
    ) -> None:
        """`reference`: the frozen initial policy, sharded as `policy` is; needed where the KL or the hold has a weight.
        Its weights become the policy's every `kl_reference_every` steps."""
        if temperature <= 0:
            raise ValueError(f"sampling.temperature = {temperature}: training needs a temperature above 0")
        weights = {name: getattr(config.objective, name) for name in ("kl_coef", "hold_coef")}
        if config.objective.has_reference != (reference is not None):
            raise ValueError(
                f"learner.objective: {weights} and {'a' if reference else 'no'} reference policy do not fit"
            )
        self.policy = policy.train()
        self.reference = reference
        self.common: int | None = None  # of the policy's first layers, those that the reference has too
        self._compared = False  # since weights were loaded
        self.config = config
        self.ranks = ranks
        self.temperature = temperature
        self.optimizer = make_optimizer(policy, config.optimizer, config.policy_lr)
        self.decoder = ImageDecoder(policy.spec)
        self.num_steps = 0
        self.num_skipped = 0
        self.guard = GuardState()
        self.scale = RunningScale(config.objective)
        self.router = RouterLoad(policy.vlm, ranks.device)
        sizes = sizes_of(policy.vlm.config.to_dict())
        self.packer = Packer(config, ranks, self.decoder, sizes, policy.banned_ids)
        self._per_episode = config.objective.aggregation == "sequence_mean"
        self._survey = Survey.of(config.objective)
        # A critic on detached states is clipped by itself: it moves nothing but itself, and scales nothing down either.
        self._apart = frozenset(policy.value_head.parameters()) if policy.has_deep_critic else frozenset()

    def step(self, groups: Sequence[Group], version: PolicyVersion, watched: Watched | None = None) -> dict[str, float]:
        """Trains on `groups`; `version` is the policy's now. Returns the metrics, the same on every rank; `watched` has
        its columns then.

        There are `passes` times `minibatches` updates. Ratios and the critic's targets are computed anew in each, so
        that later ones are corrected as stale data is; metrics are of the tokens of all updates. Once the policy has
        moved by `guard.max_kl`, the rest are left out. An update without a trainable token, or with a non-finite loss
        or gradient, changes no weight, and its step is counted.
        """
        objective = self.config.objective
        clock = Clock(self.ranks.device)
        self._compare()
        episodes = make_episodes(groups, self.decoder, objective)
        scaling = self.scale(episodes).on(self.ranks.device)
        work = Work(version, scaling, clock, TokenStats(self.ranks.device))
        factor = lr_factor(self.num_steps, self.config)
        rate = scaling.rate * self.guard.brake
        set_learning_rates(self.optimizer, factor, rate)
        clock.lap("prepare")
        if episodes and (self._survey.policy or self._survey.reference):
            episodes = self._surveyed(episodes, work)
        updates = list(cut(len(episodes), objective.passes, objective.minibatches, seed=self.num_steps))
        for number, chosen in enumerate(updates):
            work.watched = watched if number < len(updates) // objective.passes else None
            if not self._update([episodes[i] for i in chosen], work):
                work.num_left_out = len(updates) - number
                break
        self.num_steps += 1
        self.num_skipped += work.num_skipped > 0
        self.guard.bad_steps = self.guard.bad_steps + 1 if work.num_bad else 0
        work.stats.gather(self.ranks)
        if watched is not None:
            watched.gather(self.ranks)
        metrics = work.stats.metrics() | self.router.metrics(self.ranks)
        self.scale.follow(work.stats.moments())
        if objective.kl_reference_every and self.num_steps % objective.kl_reference_every == 0:
            assert isinstance(self.reference, Policy)
            copy_weights(self.policy, self.reference)
        clock.lap("optimizer")
        metrics |= self._moved(work, metrics)
        self.packer.delivery.forget()
        work.num_blank = self.decoder.take_num_blank()
        clock.lap("forward")
        largest = np.max(work.norms, axis=0).tolist()
        metrics |= {"optim/grad_norm": largest[0], "optim/lr": self.config.policy_lr * factor * rate}
        if self._apart:
            metrics["optim/value_grad_norm"] = largest[1]
        metrics["optim/skipped_steps"] = float(self.num_skipped)
        metrics["optim/bad_steps_in_a_row"] = float(self.guard.bad_steps)
        return metrics | group_metrics(groups, version, self.config) | work.done(episodes, self.ranks)

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds besides parameters and optimizer."""
        own = {"num_steps": self.num_steps, "num_skipped": self.num_skipped, **self.scale.state()}
        own["guard"] = asdict(self.guard)
        return own | ({"has_reference": True} if self.config.objective.kl_reference_every else {})

    def load_state(self, state: dict[str, Any]) -> None:
        self.num_steps, self.num_skipped = state["num_steps"], state["num_skipped"]
        self.scale.load_state(state)
        self.guard = GuardState(**state.get("guard", {}))
        self._compared = False

    # ------------------------------------------------------------------ what a step is made of

    def _compare(self) -> None:
        """Before the first step after weights were loaded. What both have frozen stays equal then."""
        if self.reference is not None and not self._compared:
            self.common = layers_alike(self.policy, self.reference, self.ranks)
        self._compared = True

    @torch.no_grad()
    def _surveyed(self, episodes: list[Episode], work: Work) -> list[Episode]:
        """The episodes with what policy and reference say of them as the step begins, on every rank."""
        asked: list[tuple[int, Policy | BasePolicy]] = [(0, self.policy)] if self._survey.policy else []
        asked += [(1, self.reference)] if self._survey.reference and self.reference is not None else []
        starts = np.cumsum([0, *(e.num_sampled for e in episodes)])
        logprobs = torch.zeros(2, int(starts[-1]), device=self.ranks.device)
        self.router.counting = False
        microbatches = self.packer.plan(episodes)
        with self.packer.batches(episodes, microbatches) as batches:
            for chosen, batch in zip(microbatches, batches, strict=True):
                order = sorted(chosen, key=lambda i: episodes[i].num_tokens)  # as `shortest_first` has them
                places = [torch.arange(starts[i], starts[i + 1], device=self.ranks.device) for i in order]
                below = None
                for row, policy in asked:
                    said = forward_only(policy, batch, self.temperature, below, keep=self.common)
                    below = said.below
                    if places and self.ranks.context.leads:
                        logprobs[row, torch.cat(places)] = said.logprobs
        found = self._survey.added(episodes, all_sum(logprobs, self.ranks).cpu().numpy(), self.config.objective)
        work.clock.lap("forward")
        return found

    def _update(self, episodes: list[Episode], work: Work) -> bool:
        """One gradient of `episodes`, applied; False, and no weight is changed, if the policy has moved far enough."""
        num_tokens = sum(e.num_sampled for e in episodes)
        divisor = max(len(episodes) if self._per_episode else num_tokens, 1)
        microbatches = self.packer.plan(episodes)
        sums = torch.zeros(4, dtype=torch.float64, device=self.ranks.device)  # loss, dropped weights, KL, tokens
        self.optimizer.zero_grad()
        work.clock.lap("prepare")
        with self.packer.batches(episodes, microbatches) as batches:
            for left, batch in zip(reversed(range(len(microbatches))), batches, strict=True):
                work.loads.append(self.packer.load(batch))
                work.clock.lap("prepare")
                sums += self._accumulate(batch, divisor, work, last=not left)
        work.last = self.packer.parts_of_last(episodes)
        parts = local_gradients(self.optimizer, self._apart)
        found = all_sum(torch.cat([sums, squares(parts, self.ranks)]), self.ranks).tolist()  # the host waits here
        (total, lost, divergence, count), norms = found[:4], np.sqrt(found[4:])
        work.divergences.append(divergence / max(count, 1.0))
        limit = self.config.guard.max_kl
        if limit and work.divergences[-1] - work.divergences[0] > limit:
            self.optimizer.zero_grad()
            return False
        kept = 1.0 - lost / divisor if num_tokens else 0.0
        self._apply(parts, norms, kept, work, sound=bool(np.isfinite(total)))
        work.clock.lap("optimizer")
        return True

    def _accumulate(self, batch: Microbatch, divisor: int, work: Work, *, last: bool) -> Tensor:
        """Adds one microbatch's share of the update's gradient; float64 [4], what `_loss` says of the tokens that this
        rank counts. `last`: of the update's."""
        self.router.counting = False  # the reference may be the policy without its adapters
        said, known = self._reference_says(batch), {}
        self.router.counting, self.router.counting_last = not batch.empty, self._predicts(batch)
        if said is not None:
            known = {"below": said.below, "labels": said.labels}
        output = self.policy(batch, self.temperature, **known)
        found = self._loss(batch, output, said, divisor, work)
        work.clock.lap("forward")
        add_up_replicas(self.policy, self.ranks, now=last)
        found[0].backward()
        work.clock.lap("backward")
        counted = torch.stack([value.detach() for value in found]).double()
        return counted if self.ranks.context.leads else torch.zeros_like(counted)

    @torch.no_grad()
    def _moved(self, work: Work, metrics: dict[str, float]) -> dict[str, float]:
        """What the guards have to know: updates that were left out, and how far the step has moved the policy where the
        behaviour of older versions will not show it; that costs a forward of a part of one microbatch."""
        found = {"guard/updates_left_out": float(work.num_left_out)}
        shown = any(name.startswith("tokens/lag_") and name != "tokens/lag_0" for name in metrics)
        if not self.config.guard.max_kl or shown or work.last is None:
            return found
        self.router.counting = False
        batch = self.packer.packed_part(work.last)
        sums = self._divergence(batch, forward_only(self.policy, batch, self.temperature).logprobs)
        total, count = all_sum(torch.stack(sums).double(), self.ranks).tolist()
        return found | {"guard/kl_step": total / max(count, 1.0)}

    def _divergence(self, batch: Microbatch, logprobs_N: Tensor) -> list[Tensor]:
        """Estimates (k3) of KL(start, policy) summed over the tokens that this rank counts, and their number. The start
        is the policy as the step began or, where its logprobs are not known, the behaviour."""
        if batch.empty or not self.ranks.context.leads:
            return [torch.zeros((), device=self.ranks.device)] * 2
        start_N = batch.behaviour_logprobs if batch.proximal_logprobs is None else batch.proximal_logprobs
        change_N = (logprobs_N - start_N).detach()
        return [(change_N.expm1() - change_N).sum(), torch.ones_like(change_N).sum()]

    def _predicts(self, batch: Microbatch) -> bool:
        """Whether what the last layer computes is read at all: not that of a rank without predictions."""
        return batch.share is None or batch.share.num_own > 0 or not self.policy.trimmed

    def _reference_says(self, batch: Microbatch) -> PolicyOutput | None:
        """None without a reference, and where all that is wanted of it was computed before the step's first update."""
        objective = self.config.objective
        if self.reference is None or (self._survey.reference and not objective.hold_coef):
            return None
        sure = objective.hold_probability if objective.hold_coef else None
        return forward_only(self.reference, batch, self.temperature, keep=self.common, sure=sure)

    def _loss(
        self, batch: Microbatch, output: PolicyOutput, said: PolicyOutput | None, divisor: int, work: Work
    ) -> list[Tensor]:
        """This microbatch's share of the update's loss, to be differentiated; what it drops; `_divergence`. `said`: by
        the reference."""
        objective = self.config.objective
        unused = 0.0 * (output.logprobs.sum() + output.entropies.sum() + output.values.sum())
        if batch.empty:
            return [unused, torch.zeros_like(unused), *self._divergence(batch, output.logprobs)]
        proximal = None
        if objective.proximal == "learner":  # in a step's only update the policy is still what it was
            proximal = batch.proximal_logprobs if self._survey.policy else output.logprobs.detach()
        whole = 1.0 / batch.episode_tokens if self._per_episode else torch.ones_like(batch.episode_tokens)
        readable = lowest(batch.readable, batch.share)
        tokens = tokens_of(batch, output, said, proximal, whole * readable)
        loss = loss_of(tokens, objective, work.scaling)
        if self.ranks.context.leads:  # the others have the same tokens
            work.stats.add(work.version - batch.versions, loss_columns(tokens, loss))
            if work.watched is not None:
                work.watched.add(batch, recorded_columns(tokens, loss))
        lost = (whole * (1.0 - readable)).sum()
        if loss.dropped is not None:
            lost = lost + (tokens.weights * loss.dropped.any_N).sum()
        share = loss.total / divisor + unused  # every output is in every backward, as the other ranks have it
        return [share, lost, *self._divergence(batch, output.logprobs)]

    def _apply(self, parts: list[list[Tensor]], norms: np.ndarray, kept: float, work: Work, *, sound: bool) -> None:
        """Clips and applies the gradient, unless it or the loss is not finite or there is none. A gradient of 0 moves
        nothing, by momentum or decay either. `parts`: this rank's, and the norms of the whole ones. `kept`: the share
        that was not dropped of the weights that it was divided by."""
        if 0.0 < kept < 1.0:
            norms = norms / kept
            for gradients in filter(None, parts):
                torch._foreach_div_(gradients, kept)
        work.norms.append(norms.tolist())
        sound = sound and bool(np.isfinite(norms).all())
        work.num_bad += not sound
        if kept <= 0.0 or not sound:
            work.num_skipped += 1
        elif norms.max() > 0.0:
            for gradients, norm in zip(parts, norms, strict=True):
                clip_(gradients, norm, self.config.optimizer.max_grad_norm)
            self.optimizer.step()
        self.optimizer.zero_grad()
