"""The learner's section of a recipe: batches, optimizer, publication, checkpoints."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from shared.config.lora_section import LoraConfig
from shared.config.objective_section import ObjectiveConfig
from shared.config.optimizer_specs import OPTIMIZERS, OptimizerSpec, optimizer_spec
from shared.config.sections import GuardConfig, Section
from shared.wire.transports import checked_address

# Words that are surely not meant as a folder.
_NO_FOLDERS = ("", "auto", "never", "true", "false", "yes", "no", "on", "off", "none", "null")
Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    """The optimizer's settings: which parameters are trained, learning rates, decay and clipping."""

    name: str = Field(
        "adamw",
        description=f"one of {', '.join(OPTIMIZERS)}; muon: for the matrices of decoder layers, with steps of AdamW's "
        "size; AdamW for the rest",
    )
    freeze: tuple[Literal["vision", "projector"], ...] = Field((), description="parts that are not trained")
    freeze_layers: int = Field(
        0,
        ge=0,
        description=(
            "number of decoder layers, from the first, that are not trained, together with the "
            "embeddings; 0 = all are trained"
        ),
    )
    lr: float = Field(1e-6, gt=0, description="learning rate of the model")
    value_lr: float = Field(1e-4, gt=0, description="learning rate of the value head")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="after the warm-up")
    warmup_steps: int = Field(0, ge=0, description="steps of linear warm-up")
    final_share: float = Field(
        0.0,
        ge=0,
        le=1,
        description="schedule = linear or cosine: share of the rates that is left after the last step; the last "
        "step itself is one step of the decay before it",
    )
    decay_share: float = Field(
        1.0,
        gt=0,
        le=1,
        description="schedule = linear or cosine: last share of the steps after warm-up in which rates fall",
    )
    weight_decay: float = Field(0.1, ge=0, description="of either optimizer, on matrices")
    betas: tuple[Beta, Beta] = Field((0.9, 0.98), description="of AdamW")
    max_grad_norm: float = Field(1.0, gt=0, description="the gradient is clipped to this norm")

    @property
    def spec(self) -> OptimizerSpec:
        """The optimizer's entry in the registry."""
        return optimizer_spec(self.name)

    @field_validator("name")
    @classmethod
    def _is_registered(cls, value: str) -> str:
        return optimizer_spec(value).name


class PublishConfig(Section):
    """How weights are published to the engines, and how it is verified that they arrived."""

    every: int = Field(1, gt=0, description="optimizer steps between weight publications")
    timeout_s: float = Field(
        120.0, gt=0, description="an engine that takes longer to join or for one bucket of weights is dropped"
    )
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
    export: bool = Field(
        False,
        description=(
            "each checkpoint also has a folder hf with the weights in model.dtype, as transformers"
            " and engines load them"
        ),
    )


class ParallelConfig(Section):
    """How the model and the computation are distributed over the ranks. No setting here changes results beyond
    rounding."""

    microbatch_tokens: int = Field(8192, gt=0, description="tokens of one packed forward, for each of its ranks")
    share_prefixes: bool = Field(True, description="tokens that a group's episodes begin with alike are computed once")
    shard_size: int = Field(0, ge=0, description="ranks that share one copy of the parameters; 0 = all of them")
    context: int = Field(1, gt=0, description="neighbouring ranks that share each microbatch, for long episodes")
    expert: int = Field(1, gt=0, description="neighbouring ranks over which a mixture's experts are dealt")
    check: bool = Field(True, description="context or expert above 1: compare with one rank's work at the start")
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
    max_minutes: float = Field(
        0.0, ge=0, description="training ends after the step that passes this; each start counts anew; 0 = no limit"
    )
    stop_without_variance: int = Field(
        0, ge=0, description="the run ends after so many steps in a row without variance of reward; 0 = never"
    )
    max_staleness: int = Field(1, ge=0, description="versions between issue and training, at most")
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
    lora: LoraConfig = LoraConfig()
    publish: PublishConfig = PublishConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    parallel: ParallelConfig = ParallelConfig()
    guard: GuardConfig = GuardConfig()

    @field_validator("bind")
    @classmethod
    def _is_an_address(cls, value: str) -> str:
        return checked_address("learner.bind", value)

    @field_validator("resume")
    @classmethod
    def _is_a_word_or_a_folder(cls, value: str) -> str:
        if value not in ("auto", "never") and value.strip().casefold() in _NO_FOLDERS:
            raise ValueError(f"learner.resume = {value!r}: write auto, never, or the folder of a checkpoint")
        return value

    @property
    def policy_lr(self) -> float:
        """Learning rate, before warm-up and decay, of the policy's weights or of the adapters trained instead."""
        return self.lora.adapter_lr if self.lora.on and self.lora.adapter_lr else self.optimizer.lr

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
    def _adapters_can_be_trained(self) -> Self:
        lora, frozen = self.lora, self.optimizer.freeze
        if not lora.on:
            return self
        if not self.optimizer.spec.supports_adapters:
            able = ", ".join(spec.name for spec in OPTIMIZERS.values() if spec.supports_adapters)
            raise ValueError(
                f"learner.optimizer.name = {self.optimizer.name!r} with learner.lora: it moves whole matrices, and "
                f"adapters are factors of some; set it to one of {able}"
            )
        if frozen and "vision" in lora.targets:
            raise ValueError(
                f"learner.optimizer.freeze = {[*frozen]} with 'vision' in learner.lora.targets: one says that it "
                "is not trained, the other that it is adapted; leave one of them out"
            )
        if self.optimizer.freeze_layers:
            raise ValueError(
                f"learner.optimizer.freeze_layers = {self.optimizer.freeze_layers} with learner.lora: adapters are "
                "trained in all layers, and all weights are frozen; leave it out"
            )
        if self.objective.kl_reference_every:
            raise ValueError(
                f"learner.objective.kl_reference_every = {self.objective.kl_reference_every} with learner.lora: the "
                "reference is the model without adapters, always; set it to 0"
            )
        if self.parallel.expert > 1:
            raise ValueError(
                f"learner.parallel.expert = {self.parallel.expert} with learner.lora: adapters are not trained beside "
                "experts that are dealt over ranks; set it to 1"
            )
        return self

    @model_validator(mode="after")
    def _a_group_is_compared(self) -> Self:
        if self.objective.is_group_relative and self.group_size < 2:
            raise ValueError(
                f"learner.group_size = {self.group_size}: {self.objective.name} compares episodes of one sample; "
                "set >= 2"
            )
        return self
