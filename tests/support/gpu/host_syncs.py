"""Counts, on a CPU, how often the host would wait for a GPU if all tensors were on it.

The host waits where it reads a tensor (`.item()`, `bool()`, `.tolist()`, `.cpu()`), where the shape of a result depends
on values (`nonzero`, indexing by booleans, `unique`, repeats by a tensor), and where Python data become a tensor on the
device (a copy from memory that is not pinned). Tensors that stay on the host by design must be marked with `keep`;
results computed only from these count as on the host, too.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from tests.support.paths import ROOT

aten = torch.ops.aten
BY_VALUE = {  # operators whose result's shape depends on values
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.unique_dim.default,
    aten.bincount.default,
    aten.equal.default,
}
BY_INDEX = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
READS = {Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__array__}  # on CPU tensors these call no operator
MAKES = {torch.tensor, torch.as_tensor, torch.from_numpy, torch.frombuffer, Tensor.new_tensor}
INDEXES = {Tensor.__getitem__, Tensor.__setitem__}


class HostSyncs:
    """The counted waits: `callers` by (kind of wait, file:line of the innermost caller outside torch)."""

    def __init__(self) -> None:
        self.callers: Counter[tuple[str, str]] = Counter()
        self._on_host = WeakTensorKeyDictionary()

    @property
    def total(self) -> int:
        return self.callers.total()

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Mark tensors that stay on the host by design."""
        for tensor in tensors:
            self._on_host[tensor] = True

    def note(self, what: str, tensors: list[Tensor]) -> None:
        if not tensors or not all(tensor in self._on_host for tensor in tensors):
            self.callers[what, caller(sys._getframe(2))] += 1

    def follow(self, tensors: list[Tensor], result: Any) -> None:
        if tensors and all(tensor in self._on_host for tensor in tensors):
            self.keep(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor))

    def __str__(self) -> str:
        lines = [f"{count:4} {what} at {where}" for (what, where), count in sorted(self.callers.items())]
        return "\n".join([f"{self.total} in all", *lines])


@contextmanager
def counted() -> Iterator[HostSyncs]:
    found = HostSyncs()
    with _Functions(found), _Operators(found):
        yield found


class _Functions(TorchFunctionMode):
    def __init__(self, found: HostSyncs) -> None:
        self.found = found

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            self.found.note(func.__name__, [args[0]])
        elif func in MAKES or (func in INDEXES and holds_list(args[1])):
            self.found.note("Python's data", [])
        return func(*args, **kwargs or {})


class _Operators(TorchDispatchMode):
    def __init__(self, found: HostSyncs) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func is aten._local_scalar_dense.default:
            self.found.note("item", tensors)
        elif func in BY_VALUE or (func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None):
            self.found.note(func.name().removeprefix("aten::"), tensors)
        elif func in BY_INDEX and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]):
            self.found.note("booleans as an index", tensors)
        result = func(*args, **kwargs or {})
        self.found.follow(tensors, result)
        return result


def holds_list(index: Any) -> bool:
    return isinstance(index, list) or (isinstance(index, tuple) and any(isinstance(part, list) for part in index))


def caller(frame: FrameType | None) -> str:
    """Return file:line of the innermost frame that is neither in torch nor in this module; a library's path is
    shortened to its last two parts."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if "torch" not in path.parts and path != Path(__file__):
            name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else Path(*path.parts[-2:])
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"
