"""The families of models that are trained, and how the published checkpoints of each name and lay out parameters.

transformers holds them otherwise: it renames what it loads, and turns the experts' matrices around. Engines are sent,
and an export holds, what the published checkpoints have.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Family:
    """From transformers' model to the published checkpoint.

    `prefixes`: (as transformers begins a name, as the checkpoint does). `turned`: how names of stacks of matrices end
    that transformers holds as [experts, out, in] and the checkpoint as [experts, in, out].
    """

    prefixes: tuple[tuple[str, str], ...] = ()
    turned: tuple[str, ...] = ()

    def published_name(self, name: str) -> str:
        """The checkpoint's name of the parameter that transformers calls `name`."""
        for own, published in self.prefixes:
            if name.startswith(own):
                return published + name.removeprefix(own)
        return name

    def is_turned(self, name: str) -> bool:
        """Whether the checkpoint holds this parameter, by either name, with its last two dimensions swapped."""
        return name.endswith(self.turned)


FAMILIES = {
    "qwen3_vl": Family(),
    "qwen3_vl_moe": Family(turned=("mlp.experts.gate_up_proj", "mlp.experts.down_proj")),
    "qwen2_5_vl": Family(prefixes=(("model.language_model.", "model."), ("model.visual.", "visual."))),
}
"""By config.json's model_type."""


def check_family(model: object, config: Mapping[str, Any]) -> None:
    """ValueError, with the list of families, if this config.json of `model`'s folder is of none of them."""
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(f"{model} holds a model of the family {kind!r}, but those that run are {', '.join(FAMILIES)}")


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a config.json says of its text model; the published ones of Qwen2.5-VL say it without a part of its own."""
    return config.get("text_config") or config
