"""Runs the learner in float64, so that rounding neither hides a mistake nor looks like one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from learner.model.weight_files import Index, WeightFiles

FLOAT32, READ = torch.float32, WeightFiles.read


def read_as_stored(files: WeightFiles, name: str, index: Index) -> Tensor:
    """Read with torch's real float32, since safetensors looks up dtypes by their names in torch."""
    with patch.object(torch, "float32", FLOAT32):
        return READ(files, name, index)


@contextmanager
def in_float64() -> Iterator[None]:
    """Make everything in the body that uses float32 use float64: parameters, activations, products, sums over ranks,
    and the parts of transformers and of the kernels that widen to float32. Data from the wire keep their type."""
    before = torch.get_default_dtype()
    with ExitStack() as stack:
        for module in ("cpu.linear", "gemm"):  # oneDNN has only float32 products
            stack.enter_context(patch(f"kernels.{module}.uses_onednn", lambda _: False))
        stack.enter_context(patch("kernels.cpu.library.library", lambda: None))  # the C kernels are float32, too
        stack.enter_context(patch.object(torch, "float32", torch.float64))
        stack.enter_context(patch.object(torch.Tensor, "float", torch.Tensor.double))
        stack.enter_context(patch("kernels.checks.DTYPES", (torch.float64,)))
        stack.enter_context(patch.object(WeightFiles, "read", read_as_stored))
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)
