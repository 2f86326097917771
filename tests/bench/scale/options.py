"""Files that a command writes at its end, refused before its work begins."""

from __future__ import annotations

import argparse
from pathlib import Path

PICTURES = (".png", ".svg", ".pdf")


def file_to_write(text: str) -> Path:
    """Its folder is made where it is missing."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder; name a file in it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"the folder of {text} cannot be made ({error.strerror}); name another"
        ) from None
    return path


def picture_to_write(text: str) -> Path:
    if Path(text).suffix not in PICTURES:
        raise argparse.ArgumentTypeError(f"{text} is no picture; its name must end in {', '.join(PICTURES)}")
    return file_to_write(text)
