"""The policy in training, its frozen reference and its frozen teacher, with the forwards that a step needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from learner.batch.microbatch import Microbatch
from learner.distributed import Ranks
from learner.model.expert_load import RouterLoad
from learner.model.lora_reference import BasePolicy
from learner.model.policy import Policy, PolicyOutput
from learner.model.sharding import forward_only
from shared.config.learner_section import LearnerConfig
from shared.config.objective_section import ObjectiveConfig
from shared.families.model_sizes import ModelSizes


@dataclass(frozen=True, slots=True)
class Beforehand:
    """The models whose logprobs are computed before a step's first update, by separate forwards without gradient.

    The policy's are not needed if a step has one update, in which it is still what it was. The reference's are not
    needed if each episode is trained on once: its forward is then part of the update. With several passes, one forward
    serves them all.
    """

    policy: bool
    reference: bool

    @staticmethod
    def needed_by(config: ObjectiveConfig) -> Beforehand:
        """Return the models that an objective's settings need."""
        several = config.passes * config.minibatches > 1
        in_advantages = config.kl_in_reward and config.is_group_relative
        moves = several and config.proximal == "learner"
        return Beforehand(moves or in_advantages, config.kl_coef != 0 and (config.passes > 1 or in_advantages))

    @property
    def is_needed(self) -> bool:
        return self.policy or self.reference


@dataclass(slots=True, eq=False)
class Models:
    """The models and settings of a step; the same for all of its updates."""

    policy: Policy
    reference: Policy | BasePolicy | None
    config: LearnerConfig
    ranks: Ranks
    temperature: float
    sizes: ModelSizes | None  # None if unknown
    router: RouterLoad
    beforehand: Beforehand
    teacher: Policy | None = None
    # Number of first layers that policy and reference share; 0: only the tower; None: nothing.
    num_common: int | None = None

    def logprobs_beforehand(self, batch: Microbatch) -> tuple[Tensor | None, Tensor | None]:
        """Return logprobs float32 [N] of the policy and of the reference, without gradient; None for one that is not
        needed before the first update. Shared layers are computed once."""
        policy = reference = None
        if self.beforehand.policy:
            policy = forward_only(self.policy, batch, self.temperature, return_lower=self.num_common)
        if self.beforehand.reference and self.reference is not None:
            lower = None if policy is None else policy.lower
            reference = forward_only(self.reference, batch, self.temperature, lower, return_lower=self.num_common)
        return None if policy is None else policy.logprobs, None if reference is None else reference.logprobs

    def reference_output(self, batch: Microbatch) -> PolicyOutput | None:
        """Return the reference's output for a microbatch; None without a reference, and if everything needed of it was
        computed before the step's first update."""
        objective = self.config.objective
        if self.reference is None or (self.beforehand.reference and not objective.hold_coef):
            return None
        label_threshold = objective.hold_probability if objective.hold_coef else None
        return forward_only(
            self.reference, batch, self.temperature, return_lower=self.num_common, label_threshold=label_threshold
        )

    def policy_output(self, batch: Microbatch, reference: PolicyOutput | None) -> PolicyOutput:
        """Return the policy's output for a microbatch, differentiable, and count the loads of its experts.

        On a rank without predictions the last layer's loads are not counted, since its output is not used.
        """
        reads_last = batch.shard is None or batch.shard.num_predictions > 0 or not self.policy.trimmed
        inputs = {} if reference is None else {"lower": reference.lower, "labels": reference.labels}
        with self.router.counting(on=not batch.empty, last_layer=reads_last):
            output: PolicyOutput = self.policy(batch, self.temperature, **inputs)
        return output

    @torch.no_grad()
    def policy_logprobs(self, batch: Microbatch) -> Tensor:
        """Return float32 [N], the logprobs of a microbatch's sampled tokens, without gradient."""
        return forward_only(self.policy, batch, self.temperature).logprobs
