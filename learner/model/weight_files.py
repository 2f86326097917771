"""A model's safetensors files: names and shapes come from the headers, values are read one tensor at a time.

Tensors have the names and shapes of transformers' models; the files may have those or the family's published ones.
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

from shared.families.model_family import ModelFamily

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = ("F64", "F32", "F16", "BF16")
RECOMPUTED = re.compile(r"\.inv_freq$")  # buffers in older checkpoints; they are recomputed, not read
Index = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor's location and layout in the files."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    transposed: bool = False  # its last two dimensions are swapped


class WeightFiles:
    """The tensors of a model's folder. The files stay open, mapped into memory, until `close`."""

    def __init__(
        self, folder: Path, stored: Mapping[str, Stored], opened: Mapping[Path, Any], stack: ExitStack
    ) -> None:
        self.folder, self.stored, self._opened, self.close = folder, stored, opened, stack.close

    @staticmethod
    def open(
        folder: str | Path, family: ModelFamily, shapes: Mapping[str, Sequence[int]], also: Iterable[str] = ()
    ) -> WeightFiles:
        """Open the files of a model with these parameters. `also`: names that may be present too, but are not read.

        Raise ValueError, in one line, if there are no weights, a file cannot be read, or a tensor is missing, has
        another shape or dtype, or does not belong to the model.
        """
        folder, opened, stored = Path(folder), dict[Path, Any](), dict[str, Stored]()
        transformers_names = {family.published_name(name): name for name in shapes}
        with ExitStack() as stack:
            for path in weight_files(folder):
                try:
                    opened[path] = file = stack.enter_context(safe_open(path, framework="pt"))
                except (SafetensorError, OSError) as error:
                    raise ValueError(f"model.path: {path} cannot be read as safetensors: {_line(error)}") from error
                for name in sorted(file.keys()):
                    part = file.get_slice(name)
                    own_name = transformers_names.get(name, name)
                    stored[own_name] = Stored(path, name, tuple(part.get_shape()), part.get_dtype())
            stored = _mark_transposed(family, stored, shapes)
            if family.ignored is not None:
                stored = {name: each for name, each in stored.items() if not family.ignored.match(name)}
            _check(folder, stored, shapes, {*also})
            return WeightFiles(folder, stored, opened, stack.pop_all())

    def read(self, name: str, index: Index) -> Tensor:
        """Return part of a tensor in the model's layout; a view of the file if the layouts agree."""
        stored = self.stored[name]
        part = self._opened[stored.file].get_slice(stored.name)
        if stored.transposed:
            *outer, rows, columns = index
            return part[(*outer, columns, rows)].transpose(-1, -2)
        return part[index]


def local_part(parameter: Tensor) -> tuple[Tensor, Index]:
    """Return this rank's part of a parameter, and the part's index in the whole."""
    if not isinstance(parameter, DTensor):
        return parameter.detach(), tuple(slice(0, size) for size in parameter.shape)
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None
    return parameter.to_local().detach(), part_at(parameter, coordinate)


def part_at(parameter: DTensor, position: Sequence[int]) -> Index:
    """Return the index of the part of the whole that belongs to this position of the parameter's mesh.

    All shards have equal size, except the last ones, which may be smaller or empty.
    """
    index = [slice(0, size) for size in parameter.shape]
    for coordinate, ranks, placement in zip(position, parameter.device_mesh.shape, parameter.placements, strict=True):
        if isinstance(placement, Shard):
            size = parameter.shape[placement.dim]
            each = -(-size // ranks)
            index[placement.dim] = slice(min(coordinate * each, size), min((coordinate + 1) * each, size))
    return tuple(index)


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files in transformers' order of preference: a single file before an index."""
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


def _mark_transposed(
    family: ModelFamily, stored: Mapping[str, Stored], shapes: Mapping[str, Sequence[int]]
) -> dict[str, Stored]:
    """Mark the stacks of experts as transposed if the files have the published layout.

    All stacks of a model have the same layout, so a stack with two equal sizes is judged by the others.
    """
    experts = [name for name in stored if family.is_transposed(name) and name in shapes]
    published = any(
        stored[name].shape != tuple(shapes[name]) and stored[name].shape == _swapped(shapes[name]) for name in experts
    )
    return {**stored, **{name: replace(stored[name], transposed=published) for name in experts}}


def _swapped(shape: Sequence[int]) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2])


def _check(folder: Path, stored: Mapping[str, Stored], shapes: Mapping[str, Sequence[int]], also: set[str]) -> None:
    """Raise ValueError that names all misfits between the files and the model."""
    missing = [name for name in shapes if name not in stored]
    surplus = [name for name in stored if name not in shapes and name not in also and not RECOMPUTED.search(name)]
    wrong = []
    for name in shapes.keys() & stored.keys():
        file_tensor, shape = stored[name], tuple(shapes[name])
        if file_tensor.shape != (_swapped(shape) if file_tensor.transposed else shape):
            wrong.append(f"{name} is {[*file_tensor.shape]} instead of {[*shape]}")
        elif file_tensor.dtype not in DTYPES:
            wrong.append(f"{name} is {file_tensor.dtype}, the learner reads {', '.join(DTYPES)}")
    troubles = [f"lacks {_some(missing)}"] if missing else []
    troubles += [f"holds {_some(surplus)}, which the model has not"] if surplus else []
    troubles += [_some(sorted(wrong))] if wrong else []
    if troubles:
        raise ValueError(
            f"model.path = {str(folder)!r} does not hold the weights of its config.json: {'; '.join(troubles)}"
        )


def _some(names: Sequence[str], most: int = 5) -> str:
    """Return the first few names, and the number of further ones."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
