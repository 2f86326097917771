"""The learner's section of a recipe: batches, objective, optimizer, checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Self, get_args

from pydantic import Field, model_validator

from shared.sections import GuardConfig, Section

GroupRelative = Literal["grpo", "gspo", "cispo"]  # these compare the episodes of one sample; others have a critic


class ObjectiveConfig(Section):
    """What is maximised: advantages, importance weights and clips, and the terms beside the policy's."""

    name: Literal["vtrace", "ppo", GroupRelative] = Field(
        "vtrace", description="vtrace, ppo: with a critic; the others are group-relative: see learner/objective/"
    )
    aggregation: Literal["token_mean", "sequence_mean"] = Field(
        "token_mean", description="each token, or each episode, weighs the same in the loss"
    )
    gamma: float = Field(1.0, ge=0, le=1, description="discount between turns (1 inside a turn)")
    lam: float = Field(1.0, ge=0, le=1, description="lambda between turns: how far targets look ahead")
    correction: Literal["importance", "none"] = Field(
        "importance", description="none takes every token for the current policy's own, however old: to compare with"
    )
    rho_bar: float | None = Field(1.0, description="truncation of rho in the targets; null = none")
    c_bar: float | None = Field(1.0, description="truncation of c, how fast corrections fade; null = none")
    pg_rho_bar: float | None = Field(1.0, description="truncation of the importance weight of the policy gradient")
    rho_noise: float = Field(
        0.0,
        ge=0,
        description="vtrace: |log rho| up to this counts as 0; 0.08 in bfloat16, whose noise ends traces",
    )
    proximal: Literal["behaviour", "learner"] = Field(
        "behaviour",
        description="what clips compare the policy with: the actors' logprobs, or the policy as the step began",
    )
    mask_token_ratio: tuple[float, float] | None = Field(
        None, description="tokens whose pi/mu is outside of [low, high] are left out; null = none"
    )
    mask_sequence_ratio: tuple[float, float] | None = Field(
        None, description="episodes whose pi/mu is outside in the geometric mean over tokens are left out; null = none"
    )
    mask_veto_ratio: float | None = Field(
        None, gt=0, lt=1, description="episodes with any token whose pi/mu is below are left out; null = none"
    )
    vtrace_level: Literal["token", "turn"] = Field("token", description="vtrace, ppo: what counts as one action")
    turn_ratio: Literal["geometric", "product"] = Field(
        "geometric",
        description="vtrace, ppo by turns: rho of a turn is this of its tokens' (product: exact, large variance)",
    )
    clip_low: float = Field(0.2, ge=0, le=1, description="ratios below 1 - clip_low get no gradient (cispo: are held)")
    clip_high: float = Field(0.28, ge=0, description="ratios above 1 + clip_high get no gradient (cispo: are held)")
    dual_clip: float | None = Field(None, gt=1, description="no gradient for bad tokens of a ratio above; null = any")
    vtrace_clip: bool = Field(False, description="vtrace: clip as the three above say, beside pg_rho_bar")
    divide_by_std: bool = Field(True, description="group-relative: divide advantages by the group's deviation")
    leave_one_out: bool = Field(False, description="group-relative: the baseline is the mean of the other episodes")
    dynamic_sampling: bool = Field(
        False, description="group-relative: groups of equal rewards are replaced by fresh ones, and counted"
    )
    overlong: Literal["train", "mask", "penalise"] = Field(
        "train", description="episodes cut off by a token limit: as others, no gradient, or less reward"
    )
    overlong_penalty: float = Field(1.0, ge=0, description="what `penalise` takes off the reward")
    overlong_tokens: int = Field(
        0, ge=0, description="penalise: sampled tokens of an episode that cost the whole penalty"
    )
    overlong_buffer: int = Field(
        0, ge=0, description="penalise: tokens before overlong_tokens over which the penalty grows; 0 = only if cut off"
    )
    kl_coef: float = Field(0.0, ge=0, description="weight of KL(policy, reference); 0 = no reference is computed")
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        "k3",
        description="of that KL, per sampled token; the gradient of k3 has no bound where the policy has moved far",
    )
    kl_reference_every: int = Field(
        0, ge=0, description="steps after which the reference becomes the policy of then; 0 = always the initial policy"
    )
    kl_in_reward: bool = Field(
        False, description="the KL, as k1, is taken off the rewards that returns are made of; it is no term of the loss"
    )
    normalize_advantages: bool = Field(
        True, description="vtrace, ppo: advantages less their running mean of the turn, over their running deviation"
    )
    advantage_memory: float = Field(
        0.9, ge=0, lt=1, description="vtrace, ppo: memory of the advantages' running moments"
    )
    advantage_floor: float = Field(
        0.1,
        ge=0,
        description="a spread of advantages below this share of the targets' (in a group: of the rewards') root mean "
        "square is noise: it is not blown up to unit size, and the policy's learning rate shrinks with it",
    )
    value_coef: float = Field(0.5, ge=0, description="vtrace, ppo: weight of the value loss")
    value_clip: float | None = Field(
        None, gt=0, description="vtrace, ppo: value errors beyond count linearly; null = squared throughout"
    )
    critic_width: int = Field(
        0, ge=0, description="vtrace, ppo: of a critic on several layers and the turn; 0 = linear, on the final state"
    )
    passes: int = Field(1, gt=0, description="times that a step trains on each of its episodes")
    minibatches: int = Field(1, gt=0, description="updates of one pass, each on its share of the episodes")
    entropy_coef: float = Field(0.0, description="weight of the entropy bonus")
    min_entropy: float = Field(
        0.0, ge=0, description="nats: the policy term is of tokens where the policy's entropy is at least this; 0 = all"
    )
    reward_scale: float = Field(1.0, description="vtrace, ppo: rewards are multiplied by this")
    turn_rewards: bool = Field(
        True, description="vtrace, ppo: train on the rewards of turns; false = the episode's at the end"
    )

    @property
    def group_relative(self) -> bool:
        """Whether advantages compare the episodes of one sample, and no critic is trained."""
        return self.name in get_args(GroupRelative)

    @model_validator(mode="after")
    def _no_setting_contradicts_another(self) -> Self:
        for wrong, reason in (*self._wrong_ratios(), *self._wrong_masks(), *self._wrong_rewards()):
            if wrong:
                raise ValueError(f"learner.objective.{reason}")
        return self

    def _wrong_ratios(self) -> Iterator[tuple[bool, str]]:
        """Whether settings contradict one another, and what to say then, from the first setting's name on."""
        yield (
            self.critic_width > 0 and self.group_relative,
            f"critic_width = {self.critic_width}: {self.name} compares the episodes of a group and trains no critic; "
            "set it to 0, or name to 'vtrace' or 'ppo'",
        )
        yield (
            self.critic_width > 0 and self.value_coef == 0,
            f"critic_width = {self.critic_width} with value_coef = 0: that critic would never learn; raise the latter",
        )
        yield (
            self.proximal == "learner" and self.name == "vtrace" and not self.vtrace_clip,
            "proximal = 'learner' is what clips compare the policy with, and vtrace clips nothing while vtrace_clip = "
            "false; set that to true, or proximal to 'behaviour'",
        )
        yield (
            self.proximal == "learner" and self.name == "cispo",
            "proximal = 'learner' is what clips compare the policy with, and cispo clips no gradient: it holds the "
            "weight pi/mu itself; set proximal to 'behaviour', or name to 'grpo'",
        )
        yield (
            self.passes > 1 and self.correction == "none" and self.proximal == "behaviour",
            f"passes = {self.passes} with correction = 'none': nothing would tell how far later passes are from the "
            "policy that played; set correction to 'importance', or proximal to 'learner'",
        )
        yield (
            self.rho_noise > 0 and (self.name != "vtrace" or self.correction == "none"),
            f"rho_noise = {self.rho_noise} with name = {self.name!r}, correction = {self.correction!r}: only vtrace "
            "with importance correction has traces of rho; set it to 0",
        )

    def _wrong_masks(self) -> Iterator[tuple[bool, str]]:
        for name in ("mask_token_ratio", "mask_sequence_ratio", "mask_veto_ratio"):
            bounds = getattr(self, name)
            yield (
                bounds is not None and self.correction == "none",
                f"{name} = {bounds} with correction = 'none', which takes every ratio for 1: nothing would ever be "
                "left out; set one of them back",
            )
            yield (
                isinstance(bounds, tuple) and not 0 < bounds[0] < 1 < bounds[1],
                f"{name} = {bounds}: a policy that has not moved has the ratio 1; set 0 < low < 1 < high",
            )

    def _wrong_rewards(self) -> Iterator[tuple[bool, str]]:
        yield (
            self.dynamic_sampling and not self.group_relative,
            "dynamic_sampling = true is for group-relative objectives; set learner.objective.name",
        )
        yield (
            self.overlong_buffer > 0 and self.overlong != "penalise",
            f"overlong_buffer = {self.overlong_buffer} is of a penalty, and overlong = {self.overlong!r}; set that to "
            "'penalise'",
        )
        yield (
            (self.overlong_buffer > 0) != (self.overlong_tokens > 0) or self.overlong_tokens < self.overlong_buffer,
            f"overlong_buffer = {self.overlong_buffer} with overlong_tokens = {self.overlong_tokens}: the penalty "
            "grows over the last overlong_buffer of so many tokens; set both, the first no larger",
        )
        for name, value in (("kl_in_reward", self.kl_in_reward), ("kl_reference_every", self.kl_reference_every)):
            yield (
                bool(value) and self.kl_coef == 0,
                f"{name} = {value} with kl_coef = 0: no KL is computed; set kl_coef",
            )
        yield (
            self.kl_in_reward and self.group_relative and self.divide_by_std,
            "kl_in_reward = true with divide_by_std = true: in a group of equal rewards the noise of the KL would be "
            "blown up to unit size; set divide_by_std to false",
        )


class OptimizerConfig(Section):
    """What a gradient does to the parameters."""

    name: Literal["adamw", "muon"] = Field(
        "adamw", description="muon: for the matrices of decoder layers, with steps of AdamW's size; AdamW for the rest"
    )
    freeze: tuple[Literal["vision", "projector"], ...] = Field((), description="parts that are not trained")
    lr: float = Field(1e-6, gt=0, description="learning rate of the model")
    value_lr: float = Field(1e-4, gt=0, description="learning rate of the value head")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="after the warm-up")
    warmup_steps: int = Field(0, ge=0, description="steps of linear warm-up")
    final_share: float = Field(
        0.0, ge=0, le=1, description="schedule = linear or cosine: share of the rates that is left at the end"
    )
    weight_decay: float = Field(0.1, ge=0, description="of either optimizer, on matrices")
    betas: tuple[float, float] = Field((0.9, 0.98), description="of AdamW")
    max_grad_norm: float = Field(1.0, gt=0, description="the gradient is clipped to this norm")
    max_bad_steps: int = Field(
        5, gt=0, description="steps in a row without a finite loss and gradient before the run stops; each is skipped"
    )


class PublishConfig(Section):
    """How weights reach the engines, and how it is verified that they have."""

    every: int = Field(1, gt=0, description="optimizer steps between weight publications")
    bucket_bytes: int = Field(512 * 2**20, gt=0, description="weights gathered and broadcast at once")
    timeout_s: float = Field(300.0, gt=0, description="an engine that takes longer for a publication is dropped")
    pause_mode: Literal["in_place", "retract"] = Field(
        "in_place", description="running requests keep their cache at a publication, or compute it anew"
    )
    verify_every: int = Field(
        1, ge=0, description="publications between verifications of the weights that engines hold; 0 = none"
    )
    canary_tolerance: float = Field(
        0.0, ge=0, description="largest mean gap of the canary's logprobs; 0 = five times the largest that passed"
    )


class CheckpointConfig(Section):
    every: int = Field(50, ge=0, description="steps between checkpoints; 0 = only at the end")
    in_background: bool = Field(True, description="train on while one is written; costs a copy in CPU memory")
    keep: int = Field(2, gt=0, description="older ones are removed")


class ParallelConfig(Section):
    """How the model and its work lie on the ranks; it changes no result beyond rounding."""

    microbatch_tokens: int = Field(8192, gt=0, description="tokens of one packed forward")
    shard_size: int = Field(0, ge=0, description="ranks that share one copy of the parameters; 0 = all of them")
    offload: bool = Field(False, description="sharded parameters, gradients, optimizer state rest in CPU memory")
    activation_checkpointing: bool = Field(False, description="compute activations again in the backward: less memory")
    compile: bool = Field(False, description="torch.compile of each block; the first steps take minutes")
    attention: Literal["auto", "flash2", "flash3", "flash4", "sdpa"] = Field(
        "auto", description="auto: torch's own flash2 in bfloat16 on a GPU, else sdpa; flash3, flash4: to be installed"
    )


class LearnerConfig(Section):
    bind: str = Field("tcp://127.0.0.1:5555", description="where actors connect")
    group_size: int = Field(1, gt=0, description="episodes of one sample")
    groups_per_step: int = Field(64, gt=0, description="groups of one optimizer step, over all ranks")
    total_steps: int = Field(100, gt=0, description="optimizer steps of the run")
    max_minutes: float = Field(0.0, ge=0, description="training ends after the step that passes this; 0 = no limit")
    stop_without_variance: int = Field(
        0, ge=0, description="the run ends after so many steps in a row without variance of reward; 0 = never"
    )
    max_staleness: int = Field(1, ge=0, description="versions between issue and training, at most")
    actor_timeout_s: float = Field(10.0, gt=0, description="an actor silent for so long is gone; its tickets go on")
    lease_s: float = Field(300.0, gt=0, description="a ticket not fulfilled by then is issued again")
    device: Literal["cpu", "cuda"] = Field("cpu", description="where the ranks compute; cuda takes one GPU a rank")
    threads: int = Field(1, gt=0, description="CPU threads of each learner rank")
    wait_timeout_s: float = Field(
        600.0, gt=0, description="longest time without groups, or without any engine that takes weights"
    )
    leave_timeout_s: float = Field(25.0, gt=0, description="after SIGTERM: longest time to a checkpoint and the end")
    resume: str = Field("auto", description="auto, never, or a checkpoint folder")
    objective: ObjectiveConfig = ObjectiveConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    publish: PublishConfig = PublishConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    parallel: ParallelConfig = ParallelConfig()
    guard: GuardConfig = GuardConfig()

    @model_validator(mode="after")
    def _a_step_can_be_cut(self) -> Self:
        episodes = self.groups_per_step * self.group_size
        if self.objective.minibatches > episodes:
            raise ValueError(
                f"learner.objective.minibatches = {self.objective.minibatches}, but a step has {episodes} episodes "
                "(learner.groups_per_step x group_size); lower it"
            )
        return self

    @model_validator(mode="after")
    def _a_group_is_compared(self) -> Self:
        if self.objective.group_relative and self.group_size < 2:
            raise ValueError(
                f"learner.group_size = {self.group_size}: {self.objective.name} compares episodes of one sample; "
                "set >= 2"
            )
        return self
