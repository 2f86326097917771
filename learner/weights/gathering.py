"""Parameters as engines and exports receive them: published names, unsharded, in buckets of bounded size.

`gathered_buckets` makes a publication's buckets on rank 0 only, each by one collective. Every rank casts its shards to
the dtype in which they are sent and packs the shards of a bucket into one row; rank 0 gathers the rows and assembles
the parameters. No other rank holds a whole bucket, with one exception: if the ranks that share a copy are on GPUs of
several hosts, rank 0's own link to the other hosts would limit a gather. Then every rank gathers all rows, over all
links, and frees them at once. Replicas other than rank 0's take no part.

`gathered` makes one whole parameter at a time on every rank; exports and checks use it.

Shape suffixes: R = ranks that share a copy of the parameters, B = bytes of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from kernels.low_rank import merged
from learner.distributed import Ranks, own_part, ranks_of_host
from learner.model.context_collectives import all_gather
from learner.model.lora_adapters import Adapters, whole
from learner.model.policy import Policy
from learner.model.weight_files import part_at
from shared.engine.adapter_names import SCALE, factor_names
from shared.families.registry import FAMILIES

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Parameters laid end to end as bytes, without padding: `flat` uint8 [bytes]. `last`: this is the publication's
    last bucket."""

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    flat: Tensor
    last: bool

    def values(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each (name, its values [n] in the dtype that is sent), as a view of `flat` if the alignment allows
        it."""
        begin = 0
        for name, dtype_name, shape in zip(self.names, self.dtypes, self.shapes, strict=True):
            dtype = getattr(torch, dtype_name)
            part = self.flat[begin : begin + math.prod(shape) * dtype.itemsize]
            yield name, (part if begin % dtype.itemsize == 0 else part.clone()).view(dtype)
            begin += len(part)


# ------------------------------------------------------------------ whole parameters, on every rank


def gathered(policy: Policy, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield each (published name, whole parameter in the published layout) on every rank. A collective if the policy is
    sharded.

    Adapters are merged into the weights that they adapt. `names`: transformers' names of the wanted parameters; None =
    all.
    """
    for name, parameter in policy.named_weights():
        if names is None or name in names:
            tensor = whole(parameter.detach())
            yield published(policy, name, policy.adapters.merged(name, tensor) if policy.adapters else tensor)


def changing(policy: Policy) -> Collection[str] | None:
    """Return the names of the parameters that training changes; None = all."""
    return policy.adapters.of.keys() if policy.adapters else None


def published(policy: Policy, name: str, tensor: Tensor) -> tuple[str, Tensor]:
    """Return the published name of a whole parameter of the policy's model, and the parameter in the published
    layout."""
    family = FAMILIES[policy.vlm.config.model_type]
    return family.published_name(name), tensor.mT if family.is_transposed(name) else tensor


def buckets(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, max_bytes: int) -> Iterator[Bucket]:
    """Cut `weights`, cast to `dtype`, into buckets of at most `max_bytes`; a larger parameter has a bucket of its
    own."""
    for named, last in split_by_size(weights, lambda weight: weight[1].numel() * dtype.itemsize, max_bytes):
        tensors = [tensor.to(dtype) for _, tensor in named]
        yield Bucket(
            names=tuple(name for name, _ in named),
            dtypes=(_dtype_name(dtype),) * len(named),
            shapes=tuple(tuple(tensor.shape) for tensor in tensors),
            flat=torch.cat([tensor.contiguous().flatten().view(torch.uint8) for tensor in tensors]),
            last=last,
        )


def split_by_size(
    items: Iterable[Item], size: Callable[[Item], int], max_size: int
) -> Iterator[tuple[list[Item], bool]]:
    """Cut `items` into runs of at most `max_size` in total; a larger item is a run of its own. Yield each (run, whether
    it is the last)."""
    held: list[Item] = []
    total = 0
    for item in items:
        if held and total + size(item) > max_size:
            yield held, False
            held, total = [], 0
        held.append(item)
        total += size(item)
    if held:
        yield held, True


# ------------------------------------------------------------------ buckets, on rank 0


@dataclass(frozen=True, slots=True, eq=False)
class SourceTensor:
    """A tensor, sharded or not, and the dtype in which its shards are sent between ranks."""

    tensor: Tensor
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class PublishedTensor:
    """A tensor that is sent under a published name, as `dtype`; its shape is that of the first source.

    `combine` computes it from the whole sources; if it is None, the only source is the tensor. `transposed`: it is sent
    with its last two dimensions swapped.
    """

    name: str
    dtype: torch.dtype
    sources: tuple[SourceTensor, ...]
    transposed: bool = False
    combine: Callable[..., Tensor] | None = None

    @property
    def shape(self) -> torch.Size:
        """The shape before transposition."""
        return self.sources[0].tensor.shape

    @property
    def sent_shape(self) -> tuple[int, ...]:
        """The shape in which engines receive it."""
        *stack, rows, columns = (1, 1, *self.shape)
        return (*stack[2:], columns, rows) if self.transposed else tuple(self.shape)

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


def published_tensors(policy: Policy) -> Iterator[PublishedTensor]:
    """Yield what a publication sends: the parameters that training changes, with adapters merged, or only the
    adapters."""
    if policy.adapters and policy.adapters.alone:
        yield from _adapter_tensors(policy, policy.adapters)
        return
    names, family = changing(policy), FAMILIES[policy.vlm.config.model_type]
    for name, parameter in policy.named_weights():
        if names is not None and name not in names:
            continue
        sent_as = family.published_name(name), policy.dtype
        transposed = family.is_transposed(name)
        if not policy.adapters:
            yield PublishedTensor(*sent_as, (SourceTensor(parameter.detach(), policy.dtype),), transposed)
            continue
        # each factor is rounded to the weight's dtype, as in a forward
        tensors = (parameter, *policy.adapters.of[name].factors)
        sources = tuple(SourceTensor(tensor.detach(), parameter.dtype) for tensor in tensors)
        yield PublishedTensor(*sent_as, sources, transposed, partial(merged, scale=policy.adapters.scale))


def _adapter_tensors(policy: Policy, adapters: Adapters) -> Iterator[PublishedTensor]:
    scale = torch.tensor([adapters.scale], dtype=torch.float64)
    yield PublishedTensor(SCALE, scale.dtype, (SourceTensor(scale, scale.dtype),))
    family = FAMILIES[policy.vlm.config.model_type]
    for name, adapter in adapters.of.items():
        for factor_name, factor in zip(factor_names(family.published_name(name)), adapter.factors, strict=True):
            yield PublishedTensor(factor_name, policy.dtype, (SourceTensor(factor.detach(), policy.dtype),))


def gathered_buckets(policy: Policy, ranks: Ranks, max_bytes: int) -> Iterator[Bucket | None]:
    """Yield a publication's buckets on rank 0, and as many times None on other ranks. A collective if the policy is
    sharded.

    A bucket has at most `max_bytes`, or is one larger parameter.
    """
    gathering = Gathering(ranks)
    for items, last in split_by_size(published_tensors(policy), lambda item: item.nbytes, max_bytes):
        yield gathering.bucket(items, last=last)


class Gathering:
    """Gathers buckets from the ranks that share a copy of the parameters with rank 0."""

    def __init__(self, ranks: Ranks) -> None:
        self._rank = ranks.rank
        self._size = ranks.size // ranks.replicas
        self._device = ranks.device
        self._takes_part = self._rank < self._size
        self._group = ranks.mesh.get_group("shard") if ranks.replicas > 1 and self._takes_part else None
        self._to_all = on_gpus_of_several_hosts(ranks)

    @torch.no_grad()
    def bucket(self, items: Sequence[PublishedTensor], *, last: bool) -> Bucket | None:
        """Gather one bucket and return it on rank 0, None on other ranks. A collective."""
        if not self._takes_part:
            return None
        sources = [source for item in items for source in item.sources]
        begins, num_bytes = self._layout_row(sources)
        rows_RB = self._gather_rows(sources, begins, num_bytes) if num_bytes else None
        if self._rank:
            return None
        flat = torch.empty(sum(item.nbytes for item in items), dtype=torch.uint8, device=self._device)
        begin, remaining = 0, iter(zip(sources, begins, strict=True))
        for item in items:
            target = flat[begin : begin + item.nbytes].view(item.dtype).view(item.sent_shape)
            located = [next(remaining) for _ in item.sources]
            self._write_item(item, target.mT if item.transposed else target, located, rows_RB)
            begin += item.nbytes
        return Bucket(
            names=tuple(item.name for item in items),
            dtypes=tuple(_dtype_name(item.dtype) for item in items),
            shapes=tuple(item.sent_shape for item in items),
            flat=flat,
            last=last,
        )

    def _layout_row(self, sources: Sequence[SourceTensor]) -> tuple[list[int | None], int]:
        """Return the byte in a row at which each source begins, the same on every rank, and the row's size.

        Each source has the space of its first shard, the largest. None instead of a byte: rank 0 has the whole source,
        and nothing is sent between ranks.
        """
        begins, end = list[int | None](), 0
        for source in sources:
            if self._size == 1 or not isinstance(source.tensor, DTensor):
                begins.append(None)
                continue
            begin = _round_up(end, source.dtype.itemsize)
            begins.append(begin)
            shape = _shape(part_at(source.tensor, [0] * source.tensor.device_mesh.ndim))
            end = begin + math.prod(shape) * source.dtype.itemsize
        return begins, _round_up(end, 8)

    def _gather_rows(
        self, sources: Sequence[SourceTensor], begins: Sequence[int | None], num_bytes: int
    ) -> Tensor | None:
        """Return all ranks' shards [R,B] on rank 0, None on other ranks. A collective."""
        row_B = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        for source, begin in zip(sources, begins, strict=True):
            if begin is not None:
                shard = source.tensor.to_local()  # type: ignore[attr-defined]
                end = begin + shard.numel() * source.dtype.itemsize
                row_B[begin:end].view(source.dtype).view(shard.shape).copy_(shard)
        if self._rank and not self._to_all:
            dist.gather(row_B, dst=0, group=self._group)
            return None
        rows_RB = row_B.new_empty(self._size, num_bytes)
        if self._to_all:
            all_gather(rows_RB.view(-1), row_B, group=self._group)
        else:
            dist.gather(row_B, list(rows_RB), dst=0, group=self._group)
        return rows_RB

    def _write_item(
        self,
        item: PublishedTensor,
        target: Tensor,
        located: Sequence[tuple[SourceTensor, int | None]],
        rows_RB: Tensor | None,
    ) -> None:
        """Write the item to `target`, which has its shape. `located`: each source, and the byte in a row at which it
        begins."""
        if item.combine is None:
            ((source, begin),) = located
            self._write_source(source, begin, target, rows_RB)
            return
        tensors = [torch.empty(source.tensor.shape, dtype=source.dtype, device=self._device) for source, _ in located]
        for (source, begin), tensor in zip(located, tensors, strict=True):
            self._write_source(source, begin, tensor, rows_RB)
        target.copy_(item.combine(*tensors))

    def _write_source(self, source: SourceTensor, begin: int | None, target: Tensor, rows_RB: Tensor | None) -> None:
        """Write the whole source to `target`, which has its shape."""
        tensor = source.tensor
        if begin is None:
            target.copy_(own_part(tensor))
            return
        assert isinstance(tensor, DTensor) and rows_RB is not None
        mesh = tensor.device_mesh
        cuts = [(*cut,) for cut in zip(mesh.shape, tensor.placements, strict=True) if isinstance(cut[1], Shard)]
        if cuts == [(self._size, Shard(0))] and len(tensor) % self._size == 0:  # equal shards of whole rows: one copy
            end = begin + tensor.numel() // self._size * source.dtype.itemsize
            shards = rows_RB[:, begin:end].view(source.dtype).unflatten(1, (-1, *tensor.shape[1:]))
            target.unflatten(0, (self._size, -1)).copy_(shards)
            return
        for rank, row_B in enumerate(rows_RB):
            index = part_at(tensor, (mesh.mesh == rank).nonzero()[0].tolist())
            shape = _shape(index)
            shard = row_B[begin : begin + math.prod(shape) * source.dtype.itemsize].view(source.dtype).view(shape)
            target[index].copy_(shard)


def on_gpus_of_several_hosts(ranks: Ranks) -> bool:
    """Tell whether ranks that share a copy of the parameters are on GPUs of several hosts."""
    return ranks.device.type == "cuda" and ranks_of_host(ranks) < ranks.size // ranks.replicas


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _shape(index: Sequence[slice]) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in index)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
