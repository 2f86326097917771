"""The paths of a task's data and model, and making or downloading them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from envs.datasets import check_columns
from envs.row_files import count_rows, dataset_files
from launch.catalog import model_folder
from launch.hub import fetch_model
from launch.prepare import DATASETS
from shared.config.recipe import ConfigError, Recipe

FILES = (".parquet", ".jsonl")


@dataclass(frozen=True, slots=True)
class Data:
    """A task's dataset; `source` is "seeds" if the environment draws its own samples."""

    source: str | tuple[str, ...]
    heldout: str
    arguments: tuple[str, ...] = ()  # arguments of launch/prepare.py, which makes the files
    raw: str = ""  # the user's file from which they are made
    columns: dict[str, str] = field(default_factory=dict)  # of the raw file, as the user has named them

    @property
    def made_columns(self) -> dict[str, str]:
        """The columns of the files that are made, for the parts that have other names in the raw file."""
        return {part: "images" if part == "image" else part for part in self.columns}

    @property
    def is_here(self) -> bool:
        return not self.arguments or all(Path(name).is_file() for name in (str(self.source), self.heldout))

    def num_rows(self) -> int | None:
        """Return the number of training rows; None if it is not known yet, or for seeds."""
        if self.source == "seeds" or (self.arguments and not self.is_here):
            return None
        return count_rows(self.source)


def data_of(recipe: Recipe, dataset: str, folder: str, *, given: bool) -> Data:
    """Return a task's dataset. `dataset` is the user's file or hub name instead of the recipe's, or ""; `folder` is
    where files are made, or ""; `given`: the user has set data.source. Raise ConfigError for a dataset that cannot be
    used, as far as this is known without a network."""
    source, heldout = recipe.data.source, recipe.data.eval_source
    module = recipe.env.module.rpartition(".")[2]
    if source == "seeds" and dataset and module in DATASETS and not given:  # in place of drawn problems
        source = f"data/{module}/train.parquet"
    if source == "seeds" or given or not isinstance(source, str):
        if dataset:
            words = "this task draws its own samples" if source == "seeds" else f"data.source = {source!r} is set"
            raise ConfigError(f"--dataset {dataset}: {words}; leave one of them out")
        if source != "seeds":
            try:
                dataset_files(source)
            except ValueError as error:
                raise ConfigError(f"data.source = {source!r}: there is no such file: {error}") from None
        return Data(source, heldout)
    task = Path(source).parent.name
    data = Path(folder) / "data" if folder else Path(source).parents[1]
    columns = recipe.data.columns if dataset else {}
    arguments: tuple[str, ...]
    if not dataset:
        made = data / task
        arguments, raw = (task, "--out", str(made)), ""
    elif Path(dataset).suffix in FILES or Path(dataset).exists():
        if not Path(dataset).is_file():
            raise ConfigError(f"--dataset {dataset}: there is no such file")
        made = data / f"{task}-{Path(dataset).stem}-{_mark(Path(dataset), columns)}"
        arguments, raw = (task, "--from", dataset, "--out", str(made)), dataset
    elif task in DATASETS and dataset.count("/") == 1:
        made = data / dataset.replace("/", "--")
        arguments, raw = (task, "--dataset", dataset, "--out", str(made)), ""
    else:
        raise ConfigError(f"--dataset {dataset}: neither a file here nor a hub name such as ORGANISATION/NAME")
    if columns:
        arguments = (*arguments, "--columns", *(f"{part}={column}" for part, column in columns.items()))
    return Data(str(made / "train.parquet"), str(made / "heldout.parquet"), arguments, raw, columns)


def _mark(file: Path, columns: Mapping[str, str]) -> str:
    """Return a short hash that distinguishes a file from others of its name, from its earlier versions, and from itself
    read with other columns."""
    stat = file.stat()
    identity = f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}" + "".join(map(str, sorted(columns.items())))
    return hashlib.sha256(identity.encode(errors="surrogateescape")).hexdigest()[:8]


def check_data(data: Data, boards: bool, columns: dict[str, str]) -> None:
    """Raise ConfigError if a file that already exists lacks a column; `boards`: the task is Sokoban; `columns`: the
    recipe's `data.columns`."""
    if data.raw and Path(data.raw).suffix in FILES:
        check_columns(data.raw, boards, raw=True, columns=data.columns)
    elif data.source != "seeds" and data.is_here:
        check_columns(data.source, boards, raw=False, columns=columns | data.made_columns)


def model_place(name: str, folder: str) -> str:
    """Return the `model.path` for a model: `name` if it is a local path; with `folder` the model's path in it; else the
    hub name."""
    if Path(name).exists():
        return name
    return str(Path(folder) / "models" / name.rpartition("/")[2]) if folder else name


def is_whole(folder: str | Path) -> bool:
    """Tell whether all files of a model are in its folder, as far as its index lists them."""
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    if not (folder / "config.json").exists():
        return False
    if not index.exists():
        return any(folder.glob("*.safetensors"))
    return all((folder / name).exists() for name in set(json.loads(index.read_text())["weight_map"].values()))


def fetch(name: str, place: str) -> None:
    """Download the hub's model `name` to `place`, continuing an interrupted download; do nothing if it is complete.
    Raise ValueError, in one line, if that fails."""
    if place == name or is_whole(place):
        return
    fetch_model(name, place)
    if not is_whole(place):
        raise ConfigError(f"{place} lacks files of {name}: give the command again, which downloads what is missing")


def download_command(name: str, place: str) -> str:
    """Return the command that downloads the model; "" if it is already here."""
    here = Path(name).exists() or (model_folder(name) is not None if place == name else is_whole(place))
    return "" if here else f"hf download {name}" + (f" --local-dir {place}" if place != name else "")
