"""Detection of damaged checkpoints: meta.json holds the size and SHA-256 of every other file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from learner.distributed import Ranks

Files = dict[str, list[Any]]  # name below the checkpoint -> [bytes, SHA-256 in hex]


class DamagedCheckpoint(ValueError):
    """A file is missing, cut off or changed, or meta.json cannot be read; the message names checkpoint and file."""


def measured(folder: Path, paths: Iterable[Path]) -> Files:
    return {str(path.relative_to(folder)): [path.stat().st_size, _digest(path)] for path in paths}


def with_digest(meta: dict[str, Any]) -> dict[str, Any]:
    """Return meta.json's values with their own SHA-256 added, so that a change of meta.json is detected too."""
    return {**meta, "digest": _digest_of(meta)}


def _digest_of(meta: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(meta).encode()).hexdigest()


def read_meta(path: Path, ranks: Ranks) -> dict[str, Any]:
    """Read meta.json of a checkpoint, on all ranks. Raise DamagedCheckpoint, on all ranks, if one of them cannot read
    it."""
    meta, reason = _meta_of(path)
    _agree(path, reason, ranks)
    return meta


def _meta_of(path: Path) -> tuple[dict[str, Any], str]:
    """Return the content of meta.json, and what is wrong with it, "" if nothing."""
    meta: dict[str, Any] = {}
    reason = ""
    try:
        meta = json.loads((path / "meta.json").read_text())
        if not isinstance(meta, dict) or "schema" not in meta:
            reason = "meta.json is no description of a checkpoint"
        elif (digest := meta.pop("digest", None)) is not None and digest != _digest_of(meta):
            reason = "meta.json holds other values than were written"
    except FileNotFoundError:
        reason = "meta.json is missing"
    except (OSError, ValueError, RecursionError) as error:
        reason = f"meta.json cannot be read: {error}"
    return meta, reason


def check_alone(path: Path) -> dict[str, Any]:
    """Check a checkpoint's files in a process that is no rank, and return the content of meta.json. Raise
    DamagedCheckpoint if a file is not as it was written."""
    meta, reason = _meta_of(path)
    faults = (
        _fault(path / name, name, *size_and_hash) for name, size_and_hash in sorted(meta.get("files", {}).items())
    )
    if reason := reason or next(filter(None, faults), ""):
        raise DamagedCheckpoint(_message(path, reason))
    return meta


def check_files(path: Path, meta: dict[str, Any], ranks: Ranks) -> None:
    """Check each rank's share of the files. Raise DamagedCheckpoint, on all ranks, if one file is not as it was
    written.

    A checkpoint of an earlier learner lists no files; then only the index of its parameters must exist.
    """
    if "files" not in meta:
        _agree(path, "" if (path / "dcp" / ".metadata").exists() else "dcp/.metadata is missing", ranks)
        return
    own_files = sorted(meta["files"].items())[ranks.rank :: ranks.size]
    _agree(
        path,
        next((fault for name, size_and_hash in own_files if (fault := _fault(path / name, name, *size_and_hash))), ""),
        ranks,
    )


def _fault(path: Path, name: str, num_bytes: int, digest: str) -> str:
    try:
        size = path.stat().st_size
        if size != num_bytes:
            return f"{name} has {size} bytes instead of {num_bytes}"
        return "" if _digest(path) == digest else f"{name} holds other bytes than were written"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error}"


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _agree(path: Path, reason: str, ranks: Ranks) -> None:
    """Raise DamagedCheckpoint on all ranks if any rank has a reason."""
    reasons: list[str] = [reason]
    if ranks.size > 1:
        reasons = [""] * ranks.size
        dist.all_gather_object(reasons, reason)
    if any(reasons):
        raise DamagedCheckpoint(_message(path, next(filter(None, reasons))))


def _message(path: Path, reason: str) -> str:
    return f"checkpoint {path} is damaged: {' '.join(reason.split())[:300]}"
