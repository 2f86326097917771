"""Checks that a teacher reads what the policy reads: the same tokens, and images cut in the same way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shared.config.recipe import ConfigError, Recipe
from shared.families.registry import read_json
from shared.vision import VisionSpec

TOWER = ("patch_size", "spatial_merge_size", "temporal_patch_size", "num_position_embeddings", "window_size")
"""What a tower's inputs follow from, in a config's vision_config."""


def check_teacher(recipe: Recipe) -> None:
    """Raise ConfigError, in one line, for a teacher whose folder is no model's, or whose family, vocabulary or images
    are not the policy's."""
    teacher, policy = recipe.learner.objective.teacher_folder, recipe.model.path
    if not teacher:
        return
    if not Path(teacher, "config.json").is_file():
        raise refused(teacher, "it is no folder of a model: it has no config.json; name one")
    configs = [read_json(Path(path, "config.json")) for path in (teacher, policy)]
    specs = [VisionSpec.load(path) for path in (teacher, policy)]
    if type(specs[0].family) is not type(specs[1].family):
        titles = [spec.family.title for spec in specs]
        raise refused(teacher, f"it is of the family {titles[0]}, and {policy} of {titles[1]}; name one of {titles[1]}")
    words, own_words = (vocabulary(path) for path in (teacher, policy))
    if words != own_words:
        other = sum(own_words.get(word) != number for word, number in words.items())
        raise refused(
            teacher,
            f"its tokenizer has {len(words)} tokens, {other} of them other ones than those of {policy} "
            f"({len(own_words)}); name a model of the same vocabulary",
        )
    sizes = [config.get("text_config", config).get("vocab_size", 0) for config in configs]
    if sizes[0] < sizes[1]:
        raise refused(teacher, f"it knows {sizes[0]} tokens, and the policy may sample {sizes[1]}; name another model")
    for name in ("patch_size", "merge_size", "temporal_patch_size", "mean", "std", "image_token_id", "banned_ids"):
        its, own = (getattr(spec, name) for spec in specs)
        if its != own:
            raise refused(teacher, f"its images have {name} = {its}, and those of {policy} {own}; name another model")
    for name in TOWER:
        its, own = ((config.get("vision_config") or {}).get(name) for config in configs)
        if its != own:
            raise refused(
                teacher, f"its vision tower has {name} = {its}, and that of {policy} {own}; name another model"
            )


def refused(teacher: str, why: str) -> ConfigError:
    return ConfigError(f"learner.objective.teacher = {teacher!r}: {why}")


def vocabulary(folder: str) -> dict[str, int]:
    """Return the tokens of a model's tokenizer with their numbers. Raise ConfigError if it cannot be read."""
    stored = read_json(Path(folder, "tokenizer.json"))
    words: Any = stored.get("model", {}).get("vocab", {})
    if not isinstance(words, dict):  # a list of pairs (token, score)
        words = {pair[0]: number for number, pair in enumerate(words)}
    return words | {token["content"]: token["id"] for token in stored.get("added_tokens", [])}
