"""Names of the tensors when an adapter is sent to engines without the weights: first the scale, then the factors."""

from __future__ import annotations

PREFIX = "base_model.model."
"""How peft's names of tensors begin."""
SCALE = f"{PREFIX}lora_scale"
"""What B A is multiplied by: float64 [1]."""


def factor_names(weight: str) -> tuple[str, str]:
    """Return peft's names of A [r, in] and B [out, r] of the weight [out, in] with this name. For a stack of E experts
    the names are formed alike, and the shapes are [E, r, in] and [E, out, r]."""
    stem = f"{PREFIX}{weight.removesuffix('.weight')}"
    return f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"


def is_of_adapter(name: str) -> bool:
    """Tell whether a tensor with this name belongs to an adapter, rather than to the model's weights."""
    return name.startswith(PREFIX)
