"""Memory layout of attention heads."""

from __future__ import annotations

from torch import Tensor


def by_token(x: Tensor) -> Tensor:
    """Return heads x [..., H, D] as [N, H, D]. A view if the heads of each token are contiguous, at any distance
    between tokens; otherwise a copy."""
    num_heads, width = x.shape[-2:]
    heads_NHD = x.reshape(x.numel() // (num_heads * width), num_heads, width)
    return heads_NHD if heads_NHD[:1].is_contiguous() else heads_NHD.contiguous()
