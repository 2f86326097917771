"""Receives weights: joins a process group, independent of torch's default group, and receives flattened buckets that
its rank 0 broadcasts."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shared.engine.checksums import engine_name
from shared.engine.weight_group_names import DEVICES, FIRST_BYTES, watchdog_s, without_watchdog
from shared.families.registry import FAMILIES

MAX_BUCKET_BYTES = 8 * 2**30


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter in a bucket. Parameters lie in the bucket in the order of the list of entries, without gaps."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def join_group(
    *, address: str, port: int, rank: int, world_size: int, name: str, backend: str, timeout_s: float
) -> Any:
    """Join the group `name`, whose rank 0 hosts the store; return this process's end of it. The store's keys are those
    of torch's own group constructor, so that the other end may use that. Raise RuntimeError if nobody answers."""
    timeout = timedelta(seconds=timeout_s)
    tcp = dist.TCPStore(address, port, world_size, is_master=rank == 0, timeout=timeout, wait_for_workers=False)
    store = dist.PrefixStore(f"{DEVICES[backend]}/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, tcp)))
    store.set_timeout(timeout)
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, world_size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=watchdog_s(timeout_s))
    with without_watchdog():
        group = dist.ProcessGroupNCCL(store, rank, world_size, options)
    broadcast(group, torch.zeros(FIRST_BYTES, dtype=torch.uint8, device=DEVICES[backend]), timeout_s)
    return group


def broadcast(group: Any, tensor: Tensor, timeout_s: float) -> None:
    """Receive a tensor from rank 0, in place. Raise RuntimeError after `timeout_s`."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    work = group.broadcast([tensor], options)
    if not work.wait(timedelta(seconds=timeout_s)):
        raise RuntimeError(f"no weights within {timeout_s:.0f} s")
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def parse_entries(names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[Entry]:
    """Return the bucket's entries. Raise ValueError if the lists differ in length, a dtype is unknown, or the bucket is
    too large."""
    if not (len(names) == len(dtypes) == len(shapes)) or not names:
        raise ValueError(f"names, dtypes and shapes have {len(names)}, {len(dtypes)} and {len(shapes)} entries")
    entries = []
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        kind = getattr(torch, dtype.removeprefix("torch."), None)
        if not isinstance(kind, torch.dtype):
            raise ValueError(f"{name} has the unknown dtype {dtype!r}")
        entries.append(Entry(name, kind, tuple(shape)))
    total = sum(entry.nbytes for entry in entries)
    if total > MAX_BUCKET_BYTES:
        raise ValueError(f"a bucket of {total} bytes: send at most {MAX_BUCKET_BYTES} at once")
    return entries


def unflatten(flat: Tensor, entries: Sequence[Entry]) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and values of the parameters in `flat` (uint8), as views where the alignment allows it."""
    start = 0
    for entry in entries:
        part = flat[start : start + entry.nbytes]
        aligned = part if start % entry.dtype.itemsize == 0 else part.clone()
        yield entry.name, aligned.view(entry.dtype).view(entry.shape)
        start += entry.nbytes


def check_finite(flat: Tensor, entries: Sequence[Entry]) -> None:
    """Raise ValueError if a parameter in `flat` (uint8) holds a value that is not finite."""
    received = dict(unflatten(flat, entries))
    largest = torch.stack([value.float() for value in torch._foreach_norm(list(received.values()), math.inf)])
    for name, sound in zip(received, largest.isfinite().tolist(), strict=True):
        if not sound:
            raise ValueError(f"{name} holds what is no finite number: the update is not installed")


class WeightLoader:
    """Writes parameters, with names and layout of the published checkpoints, into a model. Tied parameters are accepted
    under either name."""

    def __init__(self, model: Any) -> None:
        self._family = family = FAMILIES[model.config.model_type]
        every = model.named_parameters(remove_duplicate=False)
        self._parameters: dict[str, Tensor] = {family.published_name(name): parameter for name, parameter in every}
        self._own_names = [family.published_name(name) for name, _ in model.named_parameters()]
        self.device = next(model.parameters()).device
        self.changed = set[str]()  # names of the parameters loaded since the start

    @property
    def names(self) -> Collection[str]:
        return self._parameters.keys()

    def own(self, name: str) -> Tensor:
        """Return the parameter with this published name, in the model's own layout."""
        return self._parameters[name].detach()

    def published(self, name: str) -> Tensor | None:
        """Return a view of a parameter in the layout of the published checkpoints; None if the model has none of this
        name."""
        parameter = self._parameters.get(name)
        if parameter is None:
            return None
        return parameter.detach().mT if self._family.is_transposed(name) else parameter.detach()

    def check(self, entries: Sequence[Entry]) -> None:
        """Raise ValueError for a name that the model does not have, or a wrong shape."""
        for entry in entries:
            parameter = self.published(entry.name)
            if parameter is None:
                raise ValueError(f"the model has no parameter {entry.name!r}")
            if parameter.shape != entry.shape:
                raise ValueError(f"{entry.name} has the shape {list(parameter.shape)}, not {list(entry.shape)}")

    @torch.no_grad()
    def load(self, flat: Tensor, entries: Sequence[Entry]) -> None:
        received = dict(unflatten(flat, entries))
        parameters = {name: parameter for name in received if (parameter := self.published(name)) is not None}
        assert parameters.keys() == received.keys()  # ensured by `check`
        torch._foreach_copy_(list(parameters.values()), list(received.values()))
        self.changed |= received.keys()

    def get(self, name: str, limit: int) -> list[Any]:
        """Return the first `limit` rows of a parameter as nested lists of floats. Raise ValueError if there is none."""
        parameter = self.published(name)
        if parameter is None:
            raise ValueError(f"the model has no parameter {name!r}")
        return parameter[:limit].float().cpu().tolist()

    def snapshot(self, skip: Sequence[str]) -> list[tuple[str, Tensor]]:
        """Return copies of the parameters whose server name contains no fragment in `skip`, in the model's order and
        layout."""
        names = [name for name in self._own_names if not any(part in engine_name(name) for part in skip)]
        return [(name, self._parameters[name].detach().clone()) for name in names]


def raw_bytes(tensor: Tensor) -> memoryview:
    """Return the tensor's values as raw bytes, copied to the CPU if needed."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
