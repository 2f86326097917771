"""What is played and how answers are drawn: the sections data and sampling of a recipe."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, model_validator

from shared.sections import Section

SEEDS_END = 2**63  # they travel as int64


class DataConfig(Section):
    source: str = Field("seeds", description="`seeds` (each sample is a seed) or a .parquet/.jsonl file")
    first_seed: int = Field(0, ge=0, lt=SEEDS_END, description="first training seed")
    num_samples: int = Field(1_000_000_000, gt=0, description="number of training seeds")
    variants: list[dict[str, Any]] = Field(
        [], description="env_config that training seeds take in turn, such as {wall_chance = 0.15}; held-out seeds none"
    )
    eval_first_seed: int = Field(
        2_000_000_000, ge=0, lt=SEEDS_END, description="first held-out seed; never overlaps the training seeds"
    )
    eval_source: str = Field("", description="held-out dataset, when `source` is a file")

    @model_validator(mode="after")
    def _variants_are_of_seeds(self) -> Self:
        if self.variants and self.source != "seeds":
            raise ValueError(f"data.variants is for seeds, but data.source = {self.source!r}; give its rows env_config")
        return self

    @model_validator(mode="after")
    def _seeds_are_int64(self) -> Self:
        if self.first_seed + self.num_samples > SEEDS_END:
            raise ValueError(
                f"data.first_seed = {self.first_seed} with data.num_samples = {self.num_samples}: seeds end below "
                f"{SEEDS_END}; lower one of them"
            )
        return self


class SamplingConfig(Section):
    temperature: float = Field(1.0, ge=0, description="of training and of sampled evaluations")
    top_p: float = Field(1.0, gt=0, le=1, description="only 1: the engine's logprobs are of the full distribution")
    top_k: int = Field(-1, description="only -1, for the same reason")

    @model_validator(mode="after")
    def _logprobs_are_true(self) -> Self:
        if self.top_p < 1.0 or self.top_k != -1:
            raise ValueError(
                f"sampling.top_p = {self.top_p}, top_k = {self.top_k}: truncated sampling makes the behaviour logprobs "
                "untrue; set top_p = 1 and top_k = -1"
            )
        if self.temperature == 0:
            raise ValueError("sampling.temperature = 0: a greedy policy explores nothing; set it above 0")
        return self
