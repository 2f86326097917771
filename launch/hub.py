"""Models and datasets by hub name: they are downloaded once, and their local folder is returned."""

from __future__ import annotations

from pathlib import Path

from shared.config.recipe import Recipe

MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")
DATA_FILES = ("*.parquet", "*.jsonl")


def local_model(path: str, what: str = "model.path") -> str:
    """Return `path` if it exists, else the local folder of the hub's model of that name, after a download. Raise
    ValueError, in which `what` names the setting, if there is no such model."""
    return path if Path(path).exists() else str(_download(path, "model", MODEL_FILES, what, "a folder"))


def with_local_model(recipe: Recipe) -> Recipe:
    """Return the recipe with `model.path` as a local folder. Raise ValueError if it is neither a folder nor a model
    that can be downloaded."""
    model = recipe.model.model_copy(update={"path": local_model(recipe.model.path)})
    return recipe.model_copy(update={"model": model})


def fetch_model(name: str, folder: str) -> None:
    """Download the hub's model of that name into a folder, continuing an interrupted download. Raise ValueError if that
    fails."""
    _download(name, "model", MODEL_FILES, "--model", "a folder", folder)


def local_dataset(name: str) -> list[Path]:
    """Return the data files of the hub's dataset of that name, after a download. Raise ValueError if that fails, or if
    it has none."""
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
        reason = (str(error).splitlines() or [type(error).__name__])[0].removeprefix("Got: ")
        raise ValueError(f"{kind} {name!r} cannot be downloaded; give {instead} instead: {reason}") from error
