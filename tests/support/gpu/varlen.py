"""A replacement, for machines without a GPU, of torch's attention for sequences of variable length."""

from __future__ import annotations

import torch


def lower_right(q, k, v, cu_q, cu_k, max_q, max_k, scaling, causal):
    """Compute causal attention document by document; replaces `_of_documents` in learner/model/attention.py."""
    assert causal and max_q == int(cu_q.diff().max()) and max_k == int(cu_k.diff().max())
    outputs = []
    for (q0, q1), (k0, k1) in zip(cu_q.unfold(0, 2, 1).tolist(), cu_k.unfold(0, 2, 1).tolist(), strict=True):
        mask = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(k1 - k0 - (q1 - q0))
        parts = (x[a:b].transpose(0, 1) for x, a, b in ((q, q0, q1), (k, k0, k1), (v, k0, k1)))
        out = torch.nn.functional.scaled_dot_product_attention(*parts, mask, scale=scaling, enable_gqa=True)
        outputs.append(out.transpose(0, 1))
    return torch.cat(outputs)
