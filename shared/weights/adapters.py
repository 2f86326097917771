"""How an adapter travels to engines alone: the scale of its products, then its factors, by these names."""

from __future__ import annotations

PREFIX = "base_model.model."
"""How peft's names of tensors begin."""
SCALE = f"{PREFIX}lora_scale"
"""What B A is multiplied by: float64 [1]."""


def factor_names(weight: str) -> tuple[str, str]:
    """Of A [r, in] and B [out, r] of the weight [out, in] with this name: peft's. A stack's are called alike, and are
    [E, r, in] and [E, out, r]."""
    stem = f"{PREFIX}{weight.removesuffix('.weight')}"
    return f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"


def is_of_adapter(name: str) -> bool:
    """Whether a tensor of this name is part of an adapter, and no weight."""
    return name.startswith(PREFIX)
