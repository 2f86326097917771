"""What a publication sends, whole on rank 0 alone: one bucket at a time, each by one collective.

Every rank casts its shards to the dtype in which they are sent and packs those of a bucket into one row; rank 0 gathers
the rows and lays the parameters out. Nobody else holds a whole bucket, but for ranks on GPUs of several hosts: there
each gathers all rows and frees them at once, since rank 0's own link to other hosts would be the bound, while a ring
makes use of all links. Replicas other than rank 0's take no part.

Shape suffixes: R = ranks that share a copy of the parameters, B = bytes of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from kernels.low_rank import merged
from learner.distributed import Ranks, own_part, ranks_of_host
from learner.lora.adapters import Adapters
from learner.model.policy import Policy
from learner.model.weight_files import part_at
from learner.parallel.collectives import all_gather
from learner.weights.buckets import Bucket, changing, cut
from shared.weights.adapters import SCALE, factor_names
from shared.weights.families import FAMILIES


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A tensor, sharded or not, and the dtype in which it travels between ranks."""

    tensor: Tensor
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class Outgoing:
    """What is sent under a published name, as `dtype`. `made` makes it of the whole parts; None: the only part is it.
    `turned`: it is sent with its last two dimensions swapped. Its shape is that of the first part."""

    name: str
    dtype: torch.dtype
    parts: tuple[Part, ...]
    turned: bool = False
    made: Callable[..., Tensor] | None = None

    @property
    def shape(self) -> torch.Size:
        """Before it is turned."""
        return self.parts[0].tensor.shape

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


def outgoing(policy: Policy) -> Iterator[Outgoing]:
    """The parameters that training changes, adapters merged into theirs; or the adapters alone."""
    if policy.adapters and policy.adapters.alone:
        yield from _adapters_alone(policy, policy.adapters)
        return
    names, family = changing(policy), FAMILIES[policy.vlm.config.model_type]
    for name, parameter in policy.named_weights():
        if names is not None and name not in names:
            continue
        sent_as = family.published_name(name), policy.dtype
        if not policy.adapters:
            yield Outgoing(*sent_as, (Part(parameter.detach(), policy.dtype),), family.is_turned(name))
            continue
        tensors = (parameter, *policy.adapters.of[name].factors)  # the factors are rounded as in a forward
        parts = tuple(Part(tensor.detach(), parameter.dtype) for tensor in tensors)
        yield Outgoing(*sent_as, parts, family.is_turned(name), partial(merged, scale=policy.adapters.scale))


def _adapters_alone(policy: Policy, adapters: Adapters) -> Iterator[Outgoing]:
    scale = torch.tensor([adapters.scale], dtype=torch.float64)
    yield Outgoing(SCALE, scale.dtype, (Part(scale, scale.dtype),))
    family = FAMILIES[policy.vlm.config.model_type]
    for name, each in adapters.of.items():
        for own, factor in zip(factor_names(family.published_name(name)), each.factors, strict=True):
            yield Outgoing(own, policy.dtype, (Part(factor.detach(), policy.dtype),))


def gathered_buckets(policy: Policy, ranks: Ranks, max_bytes: int) -> Iterator[Bucket | None]:
    """A publication's buckets, of at most `max_bytes` or of one parameter that is larger, on rank 0; as many times None
    elsewhere. A collective where the policy is sharded."""
    gathering = Gathering(ranks)
    for items, last in cut(outgoing(policy), lambda item: item.nbytes, max_bytes):
        yield gathering.bucket(items, last=last)


class Gathering:
    """Of the ranks that share a copy of the parameters with rank 0."""

    def __init__(self, ranks: Ranks) -> None:
        self._rank, self._size, self._device = ranks.rank, ranks.size // ranks.replicas, ranks.device
        self._takes_part = self._rank < self._size
        self._group = ranks.mesh.get_group("shard") if ranks.replicas > 1 and self._takes_part else None
        self._to_all = on_gpus_of_several_hosts(ranks)

    @torch.no_grad()
    def bucket(self, items: Sequence[Outgoing], *, last: bool) -> Bucket | None:
        """None on other ranks than 0."""
        if not self._takes_part:
            return None
        parts = [part for item in items for part in item.parts]
        places, num_bytes = self._places(parts)
        rows_RB = self._rows(parts, places, num_bytes) if num_bytes else None
        if self._rank:
            return None
        flat = torch.empty(sum(item.nbytes for item in items), dtype=torch.uint8, device=self._device)
        begin, which = 0, iter(zip(parts, places, strict=True))
        for item in items:
            target = flat[begin : begin + item.nbytes].view(item.dtype).view(sent_shape(item))
            self._make(item, target.mT if item.turned else target, [next(which) for _ in item.parts], rows_RB)
            begin += item.nbytes
        return Bucket(
            names=tuple(item.name for item in items),
            dtypes=tuple(str(item.dtype).removeprefix("torch.") for item in items),
            shapes=tuple(sent_shape(item) for item in items),
            flat=flat,
            last=last,
        )

    def _places(self, parts: Sequence[Part]) -> tuple[list[int | None], int]:
        """Where in a row each part begins, the same on every rank, and the row's size: a shard is no larger than the
        first. None: rank 0 has all of it, and it does not travel."""
        places, end = list[int | None](), 0
        for part in parts:
            if self._size == 1 or not isinstance(part.tensor, DTensor):
                places.append(None)
                continue
            begin = -(-end // part.dtype.itemsize) * part.dtype.itemsize
            places.append(begin)
            shape = _shape(part_at(part.tensor, [0] * part.tensor.device_mesh.ndim))
            end = begin + math.prod(shape) * part.dtype.itemsize
        return places, -(-end // 8) * 8 if end else 0

    def _rows(self, parts: Sequence[Part], places: Sequence[int | None], num_bytes: int) -> Tensor | None:
        """All ranks' shards [R,B] on rank 0; a collective."""
        row_B = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        for part, begin in zip(parts, places, strict=True):
            if begin is not None:
                own = part.tensor.to_local()  # type: ignore[attr-defined]
                row_B[begin : begin + own.numel() * part.dtype.itemsize].view(part.dtype).view(own.shape).copy_(own)
        if self._rank and not self._to_all:
            dist.gather(row_B, dst=0, group=self._group)
            return None
        rows_RB = row_B.new_empty(self._size, num_bytes)
        if self._to_all:
            all_gather(rows_RB.view(-1), row_B, group=self._group)
        else:
            dist.gather(row_B, list(rows_RB), dst=0, group=self._group)
        return rows_RB

    def _make(
        self, item: Outgoing, target: Tensor, parts: Sequence[tuple[Part, int | None]], rows_RB: Tensor | None
    ) -> None:
        """Writes the item to `target`, of its shape."""
        if item.made is None:
            ((part, begin),) = parts
            self._lay_out(part, begin, target, rows_RB)
            return
        whole = [torch.empty(part.tensor.shape, dtype=part.dtype, device=self._device) for part, _ in parts]
        for (part, begin), tensor in zip(parts, whole, strict=True):
            self._lay_out(part, begin, tensor, rows_RB)
        target.copy_(item.made(*whole))

    def _lay_out(self, part: Part, begin: int | None, target: Tensor, rows_RB: Tensor | None) -> None:
        """Writes the whole part to `target`, of its shape."""
        tensor = part.tensor
        if begin is None:
            target.copy_(own_part(tensor))
            return
        assert isinstance(tensor, DTensor) and rows_RB is not None
        mesh = tensor.device_mesh
        cuts = [(*cut,) for cut in zip(mesh.shape, tensor.placements, strict=True) if isinstance(cut[1], Shard)]
        if cuts == [(self._size, Shard(0))] and len(tensor) % self._size == 0:  # all at once
            end = begin + tensor.numel() // self._size * part.dtype.itemsize
            shards = rows_RB[:, begin:end].view(part.dtype).unflatten(1, (-1, *tensor.shape[1:]))
            target.unflatten(0, (self._size, -1)).copy_(shards)
            return
        for rank, row_B in enumerate(rows_RB):
            index = part_at(tensor, (mesh.mesh == rank).nonzero()[0].tolist())
            shape = _shape(index)
            shard = row_B[begin : begin + math.prod(shape) * part.dtype.itemsize].view(part.dtype).view(shape)
            target[index].copy_(shard)


def on_gpus_of_several_hosts(ranks: Ranks) -> bool:
    """Whether ranks that share a copy of the parameters are."""
    return ranks.device.type == "cuda" and ranks_of_host(ranks) < ranks.size // ranks.replicas


def sent_shape(item: Outgoing) -> tuple[int, ...]:
    *stack, rows, columns = (1, 1, *item.shape)
    return (*stack[2:], columns, rows) if item.turned else tuple(item.shape)


def _shape(index: Sequence[slice]) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in index)
