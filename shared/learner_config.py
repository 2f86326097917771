"""The learner's section of a recipe: batches, optimizer, publication, checkpoints."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from shared.sections import GuardConfig, Section
from shared.settings.addresses import checked_address
from shared.settings.lora import LoraConfig
from shared.settings.objective import ObjectiveConfig

_NO_FOLDERS = ("", "auto", "never", "true", "false", "yes", "no", "on", "off", "none", "null")  # meant as words
Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    """What a gradient does to the parameters."""

    name: Literal["adamw", "muon"] = Field(
        "adamw", description="muon: for the matrices of decoder layers, with steps of AdamW's size; AdamW for the rest"
    )
    freeze: tuple[Literal["vision", "projector"], ...] = Field((), description="parts that are not trained")
    freeze_layers: int = Field(
        0, ge=0, description="so many decoder layers, from the first, and the embeddings are not trained; 0 = all are"
    )
    lr: float = Field(1e-6, gt=0, description="learning rate of the model")
    value_lr: float = Field(1e-4, gt=0, description="learning rate of the value head")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="after the warm-up")
    warmup_steps: int = Field(0, ge=0, description="steps of linear warm-up")
    final_share: float = Field(
        0.0, ge=0, le=1, description="schedule = linear or cosine: share of the rates that is left at the end"
    )
    decay_share: float = Field(
        1.0,
        gt=0,
        le=1,
        description="schedule = linear or cosine: last share of the steps after warm-up, in which rates fall",
    )
    weight_decay: float = Field(0.1, ge=0, description="of either optimizer, on matrices")
    betas: tuple[Beta, Beta] = Field((0.9, 0.98), description="of AdamW")
    max_grad_norm: float = Field(1.0, gt=0, description="the gradient is clipped to this norm")
    max_bad_steps: int = Field(
        5, gt=0, description="steps in a row without a finite loss and gradient before the run stops; each is skipped"
    )


class PublishConfig(Section):
    """How weights reach the engines, and how it is verified that they have."""

    every: int = Field(1, gt=0, description="optimizer steps between weight publications")
    bucket_bytes: int = Field(512 * 2**20, gt=0, description="weights gathered and broadcast at once")
    timeout_s: float = Field(300.0, gt=0, description="an engine that takes longer for a publication is dropped")
    senders: int = Field(
        1, gt=0, description="ranks of rank 0's host that are in the weight group: NCCL sends over the links of all"
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
        description="each holds a folder hf too: its weights in model.dtype as transformers and engines load them",
    )


class ParallelConfig(Section):
    """How the model and its work lie on the ranks; it changes no result beyond rounding."""

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
        """Of the policy, before warm-up and decay: of its weights, or of the adapters that are trained instead."""
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
        if self.optimizer.name == "muon":
            raise ValueError(
                "learner.optimizer.name = 'muon' with learner.lora: Muon makes whole matrices orthogonal, and adapters "
                "are factors of some; set it to 'adamw'"
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
        if self.objective.group_relative and self.group_size < 2:
            raise ValueError(
                f"learner.group_size = {self.group_size}: {self.objective.name} compares episodes of one sample; "
                "set >= 2"
            )
        return self
