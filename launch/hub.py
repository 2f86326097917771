"""Models and datasets by hub name: the folder on this machine, downloaded once."""

from __future__ import annotations

from pathlib import Path

from shared.config import Recipe

MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
DATA_FILES = ("*.parquet", "*.jsonl")


def local_model(path: str, what: str = "model.path") -> str:
    """`path`, which `what` names, if it is a folder, else the folder of the hub's model of that name. ValueError if it
    has none."""
    return path if Path(path).exists() else str(_download(path, "model", MODEL_FILES, what, "a folder"))


def with_local_model(recipe: Recipe) -> Recipe:
    """The recipe with `model.path` as a folder. ValueError if it is none, and no model that can be downloaded."""
    model = recipe.model.model_copy(update={"path": local_model(recipe.model.path)})
    return recipe.model_copy(update={"model": model})


def fetch_model(name: str, folder: str) -> None:
    """Downloads the hub's model of that name into a folder, and goes on where an earlier download was ended. ValueError
    if it cannot be had."""
    _download(name, "model", MODEL_FILES, "--model", "a folder", folder)


def local_dataset(name: str) -> list[Path]:
    """The data files of the hub's dataset of that name. ValueError if it cannot be had or has none."""
    folder = _download(name, "dataset", DATA_FILES, "dataset", "a file with --from FILE (--dataset of launch/run.py)")
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".parquet", ".jsonl"))
    if not files:
        raise ValueError(f"dataset {name!r} has no .parquet or .jsonl file")
    return files


def _download(name: str, kind: str, files: tuple[str, ...], what: str, instead: str, folder: str | None = None) -> Path:
    import huggingface_hub

    if name.count("/") != 1 or name.startswith((".", "/")):
        raise ValueError(f"{what} = {name!r} is neither a folder here nor a hub name such as ORGANISATION/NAME")
    try:
        return Path(
            huggingface_hub.snapshot_download(name, repo_type=kind, allow_patterns=list(files), local_dir=folder)
        )
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{kind} {name!r} cannot be downloaded; give {instead} instead: {reason}") from error
