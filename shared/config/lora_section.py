"""Adapters of low rank beside frozen weights: learner.lora of a recipe."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Self

from pydantic import Field, model_validator

from shared.config.sections import EngineConfig, Section
from shared.engine.engine_kinds import capabilities_of

Target = Literal["attention", "dense", "experts", "vision"]


class LoraConfig(Section):
    """The adapters A [rank, in] and B [out, rank] that are trained instead of a model's weights W [out, in], in W +
    alpha/rank B A (Hu et al., 2021, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1)."""

    rank: int | None = Field(
        None, description="rank of the adapters, which are trained instead of the weights; null = no adapters"
    )
    alpha: float = Field(32.0, description="what adapters add is multiplied by alpha / rank")
    targets: tuple[Target, ...] = Field(
        ("attention", "dense"),
        description="the decoder's attention and dense MLPs, a mixture's experts, the vision tower with its projector",
    )
    adapter_lr: float | None = Field(
        None,
        gt=0,
        description="learning rate of the adapters; null = learner.optimizer.lr, which suits whole weights",
    )
    adapter: str = Field("", description="folder of an adapter in peft's format to start from; empty = a new one")
    publish: Literal["merged", "adapter"] = Field(
        "merged",
        description="what engines are sent: the adapted weights with adapters merged into them, or adapters alone, "
        "which engines merge",
    )

    @property
    def on(self) -> bool:
        return self.rank is not None

    @property
    def alone(self) -> bool:
        """True if engines are sent adapters without the weights."""
        return self.publish == "adapter"

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / self.rank if self.rank else 0.0

    def unsendable(self, engine: EngineConfig, device: str) -> str:
        """Return why a learner on `device` ("cpu" or "cuda") cannot send adapters alone to the engines; empty if it
        can, or if the recipe does not ask for it."""
        if not self.alone:
            return ""
        said = f"learner.lora.publish = {self.publish!r}"
        if not engine.urls and engine.device != device:
            return (
                f"{said} with learner.device = {device!r} and engine.device = {engine.device!r}: sums are rounded "
                "alike on one kind of device alone; set publish = 'merged'"
            )
        if capabilities_of(engine.kind).stages_adapters and engine.stage_weights == "off":
            return (
                f"{said} with engine.stage_weights = 'off': the plugin that receives adapters is that which stages "
                "weights; set it to 'auto'"
            )
        return ""

    @model_validator(mode="after")
    def _adapters_are_possible(self) -> Self:
        for wrong, reason in self._wrong():
            if wrong:
                raise ValueError(f"learner.lora.{reason}")
        return self

    def _wrong(self) -> Iterator[tuple[bool, str]]:
        yield (
            self.rank is not None and self.rank < 1,
            f"rank = {self.rank}: an adapter has a rank of at least 1; leave it out to train all weights",
        )
        yield self.alpha <= 0, f"alpha = {self.alpha:g}: nothing would be added, or the opposite; set it above 0"
        yield not self.targets, "targets is empty: there is nothing to adapt; name attention, dense, experts or vision"
        yield (
            bool(self.adapter) and self.rank is None,
            f"adapter = {self.adapter!r} without learner.lora.rank; set it to the adapter's r",
        )
        yield (
            self.alone and self.rank is None,
            f"publish = {self.publish!r} without learner.lora.rank: there is no adapter to send; set a rank, or leave "
            "publish out",
        )
