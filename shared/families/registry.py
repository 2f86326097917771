"""The registry of model families, by config.json's `model_type`, and of published models. Add a family here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shared.families.glm4v.glm4v_family import Glm4v
from shared.families.model_family import ModelFamily
from shared.families.model_sizes import ModelSizes
from shared.families.qwen2_5_vl.qwen2_5_vl_family import Qwen25VL
from shared.families.qwen3.qwen3_family import Qwen3
from shared.families.qwen3_5.qwen3_5_family import Qwen35, Qwen35Moe
from shared.families.qwen3_vl.qwen3_vl_family import Qwen3VL, Qwen3VLMoe

FAMILIES: dict[str, ModelFamily] = {}
"""By config.json's model_type."""
PUBLISHED: dict[str, ModelSizes] = {}
"""The sizes of published models, by name without the variant, so that a run can be planned without a download."""
PAGE = "docs/how-to/extend.md#a-model-family"
HUB_NAMES: dict[str, str] = {}
"""The hub's name of each published model, by its name with the variant."""


def register(family: ModelFamily) -> ModelFamily:
    """Add a family with its published models; return it. ValueError if its model_type is taken."""
    if family.model_type in FAMILIES:
        raise ValueError(f"there is a family with the model_type {family.model_type!r}: give this one another")
    FAMILIES[family.model_type] = family
    for name, model in family.published.items():
        PUBLISHED[name] = model.sizes
        HUB_NAMES.update(model.hub_names(name))
    return family


register(Qwen3VL())
register(Qwen3VLMoe())
register(Qwen25VL())
register(Qwen3())
register(Qwen35())
register(Qwen35Moe())
register(Glm4v())


def family_named(model_type: Any, where: object) -> ModelFamily:
    """Return the family with this model_type. Raise ValueError if there is none; its message names `where` the type was
    read and the known families."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(
            f"{where} holds a model of the family {model_type!r}, but those that run are {', '.join(FAMILIES)}; "
            f"{PAGE} tells how to add another"
        )
    return FAMILIES[model_type]


def family_of(config: Mapping[str, Any], where: object) -> ModelFamily:
    """Return the family of the model with this config.json. Raise ValueError as `family_named` does, and for quantized
    weights, which cannot be trained."""
    quantized = config.get("quantization_config")
    if quantized:
        method = quantized.get("quant_method", "") if isinstance(quantized, Mapping) else str(quantized)[:40]
        raise ValueError(f"{where} holds quantized weights ({method}): train the model in bfloat16")
    return family_named(config.get("model_type"), where)


def family_in(folder: str | Path) -> ModelFamily:
    """Return the family of the model in a folder. Raise ValueError, in one line, if there is no config.json, or for an
    unknown family."""
    return family_of(read_json(Path(folder) / "config.json"), folder)


def vocab_size_in(folder: str | Path) -> int:
    """Return the vocabulary size, padding ids included, of the model in a folder. Raise ValueError as `family_in`
    does."""
    config = read_json(Path(folder) / "config.json")
    return int(family_of(config, folder).text_config(config)["vocab_size"])


def sizes_of(config: Mapping[str, Any]) -> ModelSizes | None:
    """Return the sizes of the model with this config.json, or None for an unknown family."""
    family = FAMILIES.get(config.get("model_type", ""))
    return None if family is None else family.sizes(config)


def find_sizes(name: str) -> ModelSizes:
    """Return the sizes of the model in a folder with config.json, or of the published model with this name. Raise
    ValueError, naming the published models, if there is neither."""
    file = Path(name) / "config.json"
    if file.exists():
        config = json.loads(file.read_text())
        return family_of(config, name).sizes(config)
    short = name.rpartition("/")[2]
    bases = [base for base in PUBLISHED if short == base or (short in HUB_NAMES and short.startswith(f"{base}-"))]
    if bases:
        return PUBLISHED[max(bases, key=len)]
    raise ValueError(f"no sizes of {name!r}: give a folder with config.json, or one of {', '.join(PUBLISHED)}")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a model's folder. Raise ValueError, in one line, if there is none."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise ValueError(f"no {path.name} in {path.parent}: give the folder of a model") from None
    except NotADirectoryError:
        raise ValueError(f"{path.parent} is a file: give the folder of a model") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read as a file: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not a JSON object: it is no model's")
    return content
