"""Receives weights: a process group beside any default one, and flattened buckets broadcast from its rank 0."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shared.weights.checksums import engine_name
from shared.weights.families import FAMILIES
from shared.weights.group import DEVICES, watchdog_s

MAX_BUCKET_BYTES = 8 * 2**30


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter in a bucket: its place is that in the list, one after the other."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def join_group(
    *, address: str, port: int, rank: int, world_size: int, name: str, backend: str, timeout_s: float
) -> Any:
    """This process's end of the group `name`, whose rank 0 hosts the store. The keys in the store are those of
    torch's own group constructor, so that the other end may be built by that. RuntimeError when nobody answers."""
    timeout = timedelta(seconds=timeout_s)
    tcp = dist.TCPStore(address, port, world_size, is_master=rank == 0, timeout=timeout, wait_for_workers=False)
    store = dist.PrefixStore(f"{DEVICES[backend]}/", dist.PrefixStore(f"{name}/", dist.PrefixStore(name, tcp)))
    store.set_timeout(timeout)
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, world_size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=watchdog_s(timeout_s))
    return dist.ProcessGroupNCCL(store, rank, world_size, options)


def nccl_version() -> str:
    """The one that this process's torch uses."""
    return ".".join(map(str, torch.cuda.nccl.version()))


def broadcast(group: Any, tensor: Tensor, timeout_s: float) -> None:
    """From rank 0 to all of the group, in place. RuntimeError after `timeout_s`."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    work = group.broadcast([tensor], options)
    if not work.wait(timedelta(seconds=timeout_s)):
        raise RuntimeError(f"no weights within {timeout_s:.0f} s")
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def parse_entries(names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> list[Entry]:
    """The bucket's entries, checked. ValueError if the lists disagree or a dtype is unknown."""
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
    """The parameters in uint8 `flat`, as views."""
    start = 0
    for entry in entries:
        part = flat[start : start + entry.nbytes]
        aligned = part if start % entry.dtype.itemsize == 0 else part.clone()
        yield entry.name, aligned.view(entry.dtype).view(entry.shape)
        start += entry.nbytes


def check_finite(flat: Tensor, entries: Sequence[Entry]) -> None:
    """ValueError for a parameter in uint8 `flat` that holds what is no finite number."""
    held = dict(unflatten(flat, entries))
    largest = torch.stack([value.float() for value in torch._foreach_norm(list(held.values()), math.inf)])
    for name, sound in zip(held, largest.isfinite().tolist(), strict=True):
        if not sound:
            raise ValueError(f"{name} holds what is no finite number: the update is not installed")


class WeightLoader:
    """Writes parameters, named and laid out as in the published checkpoints, into a model; tied ones are reached by
    either name."""

    def __init__(self, model: Any) -> None:
        self._family = family = FAMILIES[model.config.model_type]
        every = model.named_parameters(remove_duplicate=False)
        self._parameters: dict[str, Tensor] = {family.published_name(name): parameter for name, parameter in every}
        self._own_names = [family.published_name(name) for name, _ in model.named_parameters()]
        self.device = next(model.parameters()).device
        self.changed = set[str]()  # what was loaded since the start

    @property
    def names(self) -> Collection[str]:
        return self._parameters.keys()

    def own(self, name: str) -> Tensor:
        """The parameter with this published name, as the model holds it."""
        return self._parameters[name].detach()

    def published(self, name: str) -> Tensor | None:
        """A view of the model's parameter, laid out as in the published checkpoints; None if there is none."""
        own = self._parameters.get(name)
        if own is None:
            return None
        return own.detach().mT if self._family.is_turned(name) else own.detach()

    def check(self, entries: Sequence[Entry]) -> None:
        """ValueError for a name that the model does not have, or another shape."""
        for entry in entries:
            own = self.published(entry.name)
            if own is None:
                raise ValueError(f"the model has no parameter {entry.name!r}")
            if own.shape != entry.shape:
                raise ValueError(f"{entry.name} has the shape {list(own.shape)}, not {list(entry.shape)}")

    @torch.no_grad()
    def load(self, flat: Tensor, entries: Sequence[Entry]) -> None:
        held = dict(unflatten(flat, entries))
        own = {name: parameter for name in held if (parameter := self.published(name)) is not None}
        assert own.keys() == held.keys()  # `check` has seen them
        torch._foreach_copy_(list(own.values()), list(held.values()))
        self.changed |= held.keys()

    def get(self, name: str, limit: int) -> list[Any]:
        """The first `limit` rows of a parameter as nested lists of floats. ValueError if there is none."""
        own = self.published(name)
        if own is None:
            raise ValueError(f"the model has no parameter {name!r}")
        return own[:limit].float().cpu().tolist()

    def snapshot(self, skip: Sequence[str]) -> list[tuple[str, Tensor]]:
        """Copies of the parameters whose server name holds none of the fragments, in the model's order, laid out as the
        model holds them."""
        names = [name for name in self._own_names if not any(part in engine_name(name) for part in skip)]
        return [(name, self._parameters[name].detach().clone()) for name in names]


def raw_bytes(tensor: Tensor) -> memoryview:
    """The tensor's values as they lie in memory."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
