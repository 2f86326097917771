"""Where a task's data and model are, or will be, and how they get there."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from envs.datasets import check_columns
from envs.row_files import count_rows
from launch.diagnosis.places import model_folder
from launch.hub import fetch_model
from launch.prepare import DATASETS
from shared.config import ConfigError, Recipe

FILES = (".parquet", ".jsonl")


@dataclass(frozen=True, slots=True)
class Data:
    """A task's dataset; `source` is `seeds` where the environment draws its own samples."""

    source: str
    heldout: str
    arguments: tuple[str, ...] = ()  # of launch/prepare.py, which makes the files
    raw: str = ""  # a file of the user's that they are made of

    @property
    def is_here(self) -> bool:
        return not self.arguments or all(Path(name).is_file() for name in (self.source, self.heldout))

    def num_rows(self) -> int | None:
        """To train on; None where they are not known yet, or have no end."""
        return count_rows(self.source) if self.source != "seeds" and Path(self.source).is_file() else None


def data_of(recipe: Recipe, dataset: str, folder: str, *, given: bool) -> Data:
    """`dataset`: a file of the user's or a hub name, in place of the recipe's; `folder`: where files are made; `given`:
    the user has set data.source. ConfigError for what cannot be used, as far as that is known without a network."""
    source, heldout = recipe.data.source, recipe.data.eval_source
    if source == "seeds" or given:
        if dataset:
            words = f"data.source = {source!r} is set" if given else "this task draws its own samples"
            raise ConfigError(f"--dataset {dataset}: {words}; leave one of them out")
        if source != "seeds" and not Path(source).is_file():
            raise ConfigError(f"data.source = {source!r}: there is no such file")
        return Data(source, heldout)
    task = Path(source).parent.name
    data = Path(folder) / "data" if folder else Path(source).parents[1]
    arguments: tuple[str, ...]
    if not dataset:
        made = data / task
        arguments, raw = (task, "--out", str(made)), ""
    elif Path(dataset).suffix in FILES or Path(dataset).exists():
        if not Path(dataset).is_file():
            raise ConfigError(f"--dataset {dataset}: there is no such file")
        made = data / f"{task}-{Path(dataset).stem}-{_mark(Path(dataset))}"
        arguments, raw = (task, "--from", dataset, "--out", str(made)), dataset
    elif task in DATASETS and dataset.count("/") == 1:
        made = data / dataset.replace("/", "--")
        arguments, raw = (task, "--dataset", dataset, "--out", str(made)), ""
    else:
        raise ConfigError(f"--dataset {dataset}: neither a file here nor a hub name such as ORGANISATION/NAME")
    return Data(str(made / "train.parquet"), str(made / "heldout.parquet"), arguments, raw)


def _mark(file: Path) -> str:
    """What tells a file from others of its name, and from what it was."""
    found = file.stat()
    known = f"{file.resolve()} {found.st_size} {found.st_mtime_ns}"
    return hashlib.sha256(known.encode(errors="surrogateescape")).hexdigest()[:8]


def check_data(data: Data, boards: bool) -> None:
    """ConfigError for a file that is here and lacks a column; `boards`: the task's samples are Sokoban's."""
    if data.raw and Path(data.raw).suffix in FILES:
        check_columns(data.raw, boards, raw=True)
    elif data.source != "seeds" and data.is_here:
        check_columns(data.source, boards, raw=False)


def model_place(name: str, folder: str) -> str:
    """`model.path` of a model: a folder of it that is whole; with `folder` the place there; else its hub name."""
    if Path(name).exists():
        return name
    return str(Path(folder) / "models" / name.rpartition("/")[2]) if folder else name


def is_whole(folder: str | Path) -> bool:
    """Whether all files of a model are in its folder, as far as its index tells."""
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    if not (folder / "config.json").exists():
        return False
    if not index.exists():
        return any(folder.glob("*.safetensors"))
    return all((folder / name).exists() for name in set(json.loads(index.read_text())["weight_map"].values()))


def fetch(name: str, place: str) -> None:
    """The model `name` of the hub to `place`, going on where an earlier download was ended; nothing where it is there.
    ValueError, in one line."""
    if place == name or is_whole(place):
        return
    fetch_model(name, place)
    if not is_whole(place):
        raise ConfigError(f"{place} lacks files of {name}: give the command again, which downloads what is missing")


def download_command(name: str, place: str) -> str:
    """What fetches the model, as a command; "" where it is here."""
    here = Path(name).exists() or (model_folder(name) is not None if place == name else is_whole(place))
    return "" if here else f"hf download {name}" + (f" --local-dir {place}" if place != name else "")
