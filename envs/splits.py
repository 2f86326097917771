"""The split of drawn samples into those for training and those held out."""

from __future__ import annotations

import hashlib

HELD_OUT = 32  # of the 256 values of a digest's first byte


def split_of_bytes(described: bytes) -> str:
    """Return the split of what these bytes describe: "heldout" for one in eight, else "train". It depends on the bytes
    alone."""
    return "heldout" if hashlib.sha256(described).digest()[0] < HELD_OUT else "train"
