"""Groups of episodes as files, in the frames of the wire format: actors record them, and a learner can train on them
without actors.

FOLDER/00000000.group, 00000001.group, ...: each is msgpack of the list of one group's frames (see `shared.wire.codec`).
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from shared.types import Group
from shared.wire.codec import WireError, decode, frames_of

SUFFIX = ".group"


class GroupWriter:
    """Writes groups into `folder`, numbered after those already there. A file appears under its name only when it is
    complete."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.num_groups = max((int(path.stem) + 1 for path in files(folder)), default=0)

    def add(self, group: Group) -> None:
        """Write a group. Raise OSError if it cannot be written."""
        partial = self.folder / f".{self.num_groups:08d}.partial"
        partial.write_bytes(msgspec.msgpack.encode(frames_of(group)))
        os.replace(partial, self.folder / f"{self.num_groups:08d}{SUFFIX}")
        self.num_groups += 1


def files(folder: Path) -> list[Path]:
    """Return the files of the recorded groups in their order."""
    paths = folder.glob(f"*{SUFFIX}") if folder.is_dir() else ()
    return sorted(path for path in paths if path.stem.isdigit())


def read(path: Path) -> Group:
    """Return one recorded group. Raise ValueError, which names the file, if the file holds no group of this schema
    version."""
    try:
        group = decode(msgspec.msgpack.decode(path.read_bytes(), type=list[bytes]))
    except (WireError, msgspec.MsgspecError) as error:
        if isinstance(error, WireError) and error.reason == "schema_version":
            raise ValueError(f"{path} is of another schema: record again with launch/actors.py --record") from error
        raise ValueError(f"{path} is no recorded group: {error}") from error
    if not isinstance(group, Group):
        raise ValueError(f"{path} holds a {type(group).__name__}, not a group; record with launch/actors.py --record")
    return group
