"""Heads as they lie in memory."""

from __future__ import annotations

from torch import Tensor


def by_token(x: Tensor) -> Tensor:
    """Heads x [..., H, D] as [N, H, D] where a token's heads lie one after another, tokens at any distance; a copy only
    if they do not."""
    num_heads, width = x.shape[-2:]
    heads_NHD = x.reshape(x.numel() // (num_heads * width), num_heads, width)
    return heads_NHD if heads_NHD[:1].is_contiguous() else heads_NHD.contiguous()
