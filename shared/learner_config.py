"""The learner's section of a recipe: batches, objective, optimizer, checkpoints."""

from __future__ import annotations

from typing import Literal, Self, get_args

from pydantic import Field, model_validator

from shared.sections import Section

GroupRelative = Literal["grpo", "gspo", "cispo"]  # these compare the episodes of one sample; others have a critic


class ObjectiveConfig(Section):
    """What is maximised: advantages, importance weights and clips, and the terms beside the policy's."""

    name: Literal["vtrace", GroupRelative] = Field(
        "vtrace", description="V-trace with a value head; the others are group-relative: see learner/objectives.py"
    )
    aggregation: Literal["token_mean", "sequence_mean"] = Field(
        "token_mean", description="each token, or each episode, weighs the same in the loss"
    )
    gamma: float = Field(1.0, ge=0, le=1, description="discount between turns (1 inside a turn)")
    lam: float = Field(1.0, ge=0, le=1, description="lambda between turns: how far V-trace looks ahead")
    correction: Literal["importance", "none"] = Field(
        "importance", description="none takes every token for the current policy's own, however old: to compare with"
    )
    rho_bar: float | None = Field(1.0, description="truncation of rho in the targets; null = none")
    c_bar: float | None = Field(1.0, description="truncation of c, how fast corrections fade; null = none")
    pg_rho_bar: float | None = Field(1.0, description="truncation of the importance weight of the policy gradient")
    vtrace_level: Literal["token", "turn"] = Field("token", description="vtrace: what counts as one action")
    turn_ratio: Literal["geometric", "product"] = Field(
        "geometric", description="vtrace, turns: rho of a turn is this of its tokens' (product: exact, large variance)"
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
    kl_coef: float = Field(0.0, ge=0, description="weight of KL(policy, initial policy); 0 = no reference is computed")
    kl_estimator: Literal["k1", "k2", "k3"] = Field("k3", description="of that KL, per sampled token")
    normalize_advantages: bool = Field(True, description="vtrace: divide advantages by their running scale")
    advantage_memory: float = Field(0.9, ge=0, lt=1, description="vtrace: memory of the advantages' running scale")
    advantage_floor: float = Field(
        0.0, ge=0, description="vtrace: smallest scale that advantages are divided by, so that noise is not blown up"
    )
    value_coef: float = Field(0.5, ge=0, description="vtrace: weight of the value loss")
    value_clip: float | None = Field(
        None, gt=0, description="vtrace: value errors beyond count linearly; null = squared throughout"
    )
    critic_width: int = Field(
        0, ge=0, description="vtrace: of a critic on several layers and the turn; 0 = linear, on the final state"
    )
    passes: int = Field(1, gt=0, description="times that a step trains on each of its episodes")
    minibatches: int = Field(1, gt=0, description="updates of one pass, each on its share of the episodes")
    entropy_coef: float = Field(0.0, description="weight of the entropy bonus")
    reward_scale: float = Field(1.0, description="vtrace: rewards are multiplied by this")
    turn_rewards: bool = Field(
        True, description="vtrace: train on the rewards of turns; false = the episode's at the end"
    )

    @property
    def group_relative(self) -> bool:
        """Whether advantages compare the episodes of one sample, and no critic is trained."""
        return self.name in get_args(GroupRelative)

    @model_validator(mode="after")
    def _only_groups_are_sampled_dynamically(self) -> Self:
        if self.dynamic_sampling and not self.group_relative:
            raise ValueError(
                "learner.objective.dynamic_sampling = true is for group-relative objectives; set learner.objective.name"
            )
        return self

    @model_validator(mode="after")
    def _only_a_critic_has_a_width(self) -> Self:
        if self.critic_width and self.group_relative:
            raise ValueError(
                f"learner.objective.critic_width = {self.critic_width}: {self.name} compares the episodes of a group "
                "and trains no critic; set it to 0 or learner.objective.name = 'vtrace'"
            )
        return self


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
        0.0, ge=0, description="largest mean gap of the canary's logprobs; 0 = 0.001 in float32, 0.5 in bfloat16"
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

    @model_validator(mode="after")
    def _a_group_is_compared(self) -> Self:
        if self.objective.group_relative and self.group_size < 2:
            raise ValueError(
                f"learner.group_size = {self.group_size}: {self.objective.name} compares episodes of one sample; "
                "set >= 2"
            )
        return self
