"""A model's safetensors files, read piece by piece: names and shapes from their headers, values a tensor at a time.

Tensors are known by the names and shapes of transformers' models; files may have those or the family's published ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from shared.weights.families import Family

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = ("F64", "F32", "F16", "BF16")
RECOMPUTED = re.compile(r"\.inv_freq$")  # older checkpoints hold what is no weight
Index = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor is, and how it lies there."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    transposed: bool = False  # its last two dimensions


class WeightFiles:
    """The tensors of a model's folder. Files stay open, mapped into memory, until `close`."""

    def __init__(
        self, folder: Path, stored: Mapping[str, Stored], opened: Mapping[Path, Any], stack: ExitStack
    ) -> None:
        self.folder, self.stored, self._opened, self.close = folder, stored, opened, stack.close

    @staticmethod
    def open(
        folder: str | Path, family: Family, shapes: Mapping[str, Sequence[int]], also: Iterable[str] = ()
    ) -> WeightFiles:
        """Of a model with these parameters. `also`: names that may be there besides, without being read.

        ValueError, in one line: there are no weights, a file cannot be read, or a tensor is missing, of another shape
        or dtype, or not the model's.
        """
        folder, opened, stored = Path(folder), dict[Path, Any](), dict[str, Stored]()
        own = {family.published_name(name): name for name in shapes}
        with ExitStack() as stack:
            for path in _files(folder):
                try:
                    opened[path] = file = stack.enter_context(safe_open(path, framework="pt"))
                except (SafetensorError, OSError) as error:
                    raise ValueError(f"model.path: {path} cannot be read as safetensors: {_line(error)}") from error
                for name in sorted(file.keys()):
                    part = file.get_slice(name)
                    stored[own.get(name, name)] = Stored(path, name, tuple(part.get_shape()), part.get_dtype())
            stored = _turned(family, stored, shapes)
            _check(folder, stored, shapes, {*also})
            return WeightFiles(folder, stored, opened, stack.pop_all())

    def read(self, name: str, index: Index) -> Tensor:
        """That part of the tensor as the model has it; a view of the file where the layouts agree."""
        stored = self.stored[name]
        part = self._opened[stored.file].get_slice(stored.name)
        if stored.transposed:
            *outer, rows, columns = index
            return part[(*outer, columns, rows)].transpose(-1, -2)
        return part[index]


def local_part(parameter: Tensor) -> tuple[Tensor, Index]:
    """What this rank holds of a parameter, and which part of the whole it is."""
    if not isinstance(parameter, DTensor):
        return parameter.detach(), tuple(slice(0, size) for size in parameter.shape)
    own = parameter.device_mesh.get_coordinate()
    assert own is not None
    return parameter.to_local().detach(), part_at(parameter, own)


def part_at(parameter: DTensor, place: Sequence[int]) -> Index:
    """Which part of the whole lies at this place of the parameter's mesh: shards of equal size, as far as they go."""
    index = [slice(0, size) for size in parameter.shape]
    for coordinate, ranks, placement in zip(place, parameter.device_mesh.shape, parameter.placements, strict=True):
        if isinstance(placement, Shard):
            size = parameter.shape[placement.dim]
            each = -(-size // ranks)
            index[placement.dim] = slice(min(coordinate * each, size), min((coordinate + 1) * each, size))
    return tuple(index)


def _files(folder: Path) -> list[Path]:
    """As transformers chooses them: the whole file before an index."""
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    if not (folder / INDEX).is_file():
        raise ValueError(f"model.path = {str(folder)!r} holds no weights: neither {WHOLE} nor {INDEX} is there")
    try:
        names = sorted({*json.loads((folder / INDEX).read_text())["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"model.path: {folder / INDEX} is no index of weights: {_line(error)}") from error
    lost = [name for name in names if not (folder / name).is_file()]
    if lost:
        raise ValueError(f"model.path = {str(folder)!r} lacks {_some(lost)} of its {INDEX}; download the model again")
    return [folder / name for name in names]


def _turned(family: Family, stored: Mapping[str, Stored], shapes: Mapping[str, Sequence[int]]) -> dict[str, Stored]:
    """With the stacks of experts marked if they lie as they are published. All of a model's lie alike, so that one
    whose two sizes are equal is known by the others."""
    experts = [name for name in stored if family.is_turned(name) and name in shapes]
    published = any(
        stored[name].shape != tuple(shapes[name]) and stored[name].shape == _swapped(shapes[name]) for name in experts
    )
    return {**stored, **{name: replace(stored[name], transposed=published) for name in experts}}


def _swapped(shape: Sequence[int]) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2])


def _check(folder: Path, stored: Mapping[str, Stored], shapes: Mapping[str, Sequence[int]], also: set[str]) -> None:
    """ValueError naming what does not fit."""
    missing = [name for name in shapes if name not in stored]
    surplus = [name for name in stored if name not in shapes and name not in also and not RECOMPUTED.search(name)]
    wrong = []
    for name in shapes.keys() & stored.keys():
        known, shape = stored[name], tuple(shapes[name])
        if known.shape != (_swapped(shape) if known.transposed else shape):
            wrong.append(f"{name} is {[*known.shape]} instead of {[*shape]}")
        elif known.dtype not in DTYPES:
            wrong.append(f"{name} is {known.dtype}, the learner reads {', '.join(DTYPES)}")
    troubles = [f"lacks {_some(missing)}"] if missing else []
    troubles += [f"holds {_some(surplus)}, which the model has not"] if surplus else []
    troubles += [_some(sorted(wrong))] if wrong else []
    if troubles:
        raise ValueError(
            f"model.path = {str(folder)!r} does not hold the weights of its config.json: {'; '.join(troubles)}"
        )


def _some(names: Sequence[str], most: int = 5) -> str:
    """The first few, and how many more."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
