"""Why a checkpoint could not be written, in words."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from learner.checkpoints.saver import reason_of


def wrapped(error: BaseException) -> BaseException:
    """As torch's writer wraps an error of the disk: in one of its own, and that in the exception of all ranks."""
    try:
        try:
            raise error
        except BaseException as cause:
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598") from cause
    except RuntimeError as inner:
        return CheckpointException("write", {0: (inner, None)})  # type: ignore[dict-item]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_named_however_its_error_was_wrapped(tmp_path: Path, number: int) -> None:
    error = OSError(number, "No space left on device")
    for each in (error, wrapped(error)):
        assert reason_of(each, tmp_path / "not" / "there") == f"the disk of {tmp_path / 'not' / 'there'} is full"


def test_another_error_is_told_without_a_traceback(tmp_path: Path) -> None:
    assert reason_of(OSError(errno.EIO, "Input/output error"), tmp_path) == "[Errno 5] Input/output error"
    assert reason_of(wrapped(OSError(errno.EIO, "x")), tmp_path).startswith("[enforce fail at inline_container.cc:672]")
    assert reason_of(ValueError("no config.json in model"), tmp_path) == "no config.json in model"
