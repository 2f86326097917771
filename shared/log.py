"""One line per event on stderr: time, process, level, message."""

from __future__ import annotations

import logging
import re
import sys

from shared.redaction import redact_text

TIME = "%Y-%m-%d %H:%M:%S"  # a run may last for weeks
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # a terminal would execute them; tab and line feed stay


class _OneLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = _CONTROL.sub(lambda match: f"\\x{ord(match.group()):02x}", redact_text(super().format(record)))
        return text.replace("\n", "\n    ")


def get_logger(process_name: str) -> logging.Logger:
    """Return the logger of a process (or of a part of it), such as `learner[0]`; it is made once for each name."""
    logger = logging.getLogger(f"pronk.{process_name}")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_OneLine(f"%(asctime)s {process_name} %(levelname)s %(message)s", TIME))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    return logger
