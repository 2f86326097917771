"""The sections data and sampling of a recipe: which samples are played, and how answers are sampled."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from shared.config.sections import Section

SEEDS_END = 2**63  # seeds are sent as int64
COLUMNS = ("problem", "answer", "image", "choices")
"""The parts of a dataset's row whose columns `data.columns` may name."""
OTHER_NAMES = {"prompt": "problem", "images": "image"}
"""Other names of these parts."""
HELD_OUT_FIRST_SEED = 2_000_000_000
"""The first held-out seed; training seeds never overlap the held-out ones."""


class DataConfig(Section):
    source: str | tuple[str, ...] = Field(
        "seeds",
        description=(
            "`seeds` (each sample is a seed), or a .parquet/.jsonl file, a folder of them, a pattern, or a list of "
            "these"
        ),
    )
    weights: tuple[float, ...] = Field(
        (),
        description="share of the samples that comes from each of a list of sources, relative to the others; empty = "
        "as many as they have",
    )
    image_cache: str = Field(
        "",
        description="folder into which images of http(s) addresses are downloaded, once each; empty = rows with "
        "addresses are left out",
    )
    first_seed: int = Field(0, ge=0, lt=SEEDS_END, description="first training seed")
    num_samples: int = Field(1_000_000_000, gt=0, description="number of training seeds")
    variants: list[dict[str, Any]] = Field(
        [],
        description=(
            "env_config values that training seeds use in turn, such as {wall_chance = 0.15}; held-out seeds use none"
        ),
    )
    eval_source: str = Field("", description="held-out dataset, when `source` is a file")
    columns: dict[str, str] = Field(
        {},
        description=(
            "columns of the dataset, if their names are not found: prompt, answer, images, choices, as in "
            '{prompt = "question", answer = "reward_model.ground_truth"}'
        ),
    )

    @field_validator("source", mode="before")
    @classmethod
    def _one_is_no_list(cls, source: Any) -> Any:
        """Return the only one of a list by itself, as a command line gives it; `~/` in a list is the home folder."""
        if isinstance(source, list | tuple) and all(isinstance(each, str) for each in source):
            paths = [os.path.expanduser(each) if each.startswith("~/") else each for each in source]
            return paths[0] if len(paths) == 1 else tuple(paths)
        return source

    @field_validator("columns")
    @classmethod
    def _columns_are_known(cls, columns: dict[str, str]) -> dict[str, str]:
        """Return the columns by the parts that they hold. Raise ValueError for an unknown part, or one named twice."""
        return checked_columns(columns, "data.columns")

    @property
    def paths(self) -> tuple[str, ...]:
        """The files, folders and patterns of a dataset; () for seeds."""
        return () if self.source == "seeds" else (self.source,) if isinstance(self.source, str) else self.source

    @model_validator(mode="after")
    def _sources_have_weights(self) -> Self:
        if not self.source or "seeds" in self.paths or "" in self.paths:
            raise ValueError(f"data.source = {self.source!r}: write 'seeds' alone, or a file, or a list of files")
        if not self.weights:
            return self
        if len(self.weights) != len(self.paths) or len(self.paths) < 2:
            raise ValueError(
                f"data.weights has {len(self.weights)}, but data.source is "
                f"{f'a list of {len(self.paths)}' if len(self.paths) > 1 else 'no list'}: give one for each of a list"
            )
        if wrong := next((number for number, weight in enumerate(self.weights) if weight <= 0), -1) + 1:
            raise ValueError(
                f"data.weights has {self.weights[wrong - 1]:g} for {self.paths[wrong - 1]!r}: give it one above 0, or "
                "leave the file out"
            )
        return self

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


def checked_columns(columns: Mapping[str, str], place: str) -> dict[str, str]:
    """Return the columns by their parts in `COLUMNS`. Raise ValueError, which names `place`, for an unknown part, or
    for one that is named twice."""
    parts: dict[str, str] = {}
    for key, column in columns.items():
        part = OTHER_NAMES.get(key, key)
        if part not in COLUMNS:
            near = difflib.get_close_matches(key, [*COLUMNS, *OTHER_NAMES], n=1)
            names = "prompt (or problem), answer, images (or image), choices"
            hint = f"did you mean {near[0]!r}?" if near else f"it may name {names}"
            raise ValueError(f"{place}.{key}: {hint}")
        if part in parts:
            raise ValueError(f"{place}.{key}: {part!r} is named twice, by another name too; leave one out")
        if not isinstance(column, str):
            raise ValueError(f"{place}.{key} = {column!r}: write the column's name, a text")
        parts[part] = column
    return parts


class SamplingConfig(Section):
    temperature: float = Field(1.0, ge=0, description="of training and of sampled evaluations")

    @model_validator(mode="after")
    def _policy_explores(self) -> Self:
        if self.temperature == 0:
            raise ValueError("sampling.temperature = 0: a greedy policy explores nothing; set it above 0")
        return self
