"""Groups on disk, as the wire's own frames: actors record them, and a learner trains on them without actors.

FOLDER/00000000.group, 00000001.group, ...: each is msgpack of the list of one group's frames (see `shared.codec`).
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from shared.codec import WireError, decode, frames_of
from shared.types import Group

SUFFIX = ".group"


class Recorder:
    """Writes groups into `folder`, after those already there. A file appears when it is complete."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.num_groups = max((int(path.stem) + 1 for path in files(folder)), default=0)

    def add(self, group: Group) -> None:
        partial = self.folder / f".{self.num_groups:08d}.partial"
        partial.write_bytes(msgspec.msgpack.encode(frames_of(group)))
        os.replace(partial, self.folder / f"{self.num_groups:08d}{SUFFIX}")
        self.num_groups += 1


def files(folder: Path) -> list[Path]:
    """The recorded groups in their order."""
    found = folder.glob(f"*{SUFFIX}") if folder.is_dir() else ()
    return sorted(path for path in found if path.stem.isdigit())


def read(path: Path) -> Group:
    """One recorded group; ValueError, naming the file, if it is none of this schema."""
    try:
        group = decode(msgspec.msgpack.decode(path.read_bytes(), type=list[bytes]))
    except (WireError, msgspec.MsgspecError) as error:
        if isinstance(error, WireError) and error.reason == "schema_version":
            raise ValueError(f"{path} is of another schema: record again with launch/actors.py --record") from error
        raise ValueError(f"{path} is no recorded group: {error}") from error
    if not isinstance(group, Group):
        raise ValueError(f"{path} holds a {type(group).__name__}, not a group; record with launch/actors.py --record")
    return group
