"""One line per event on stderr: time, process, level, message."""

from __future__ import annotations

import logging
import sys


class _OneLine(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).replace("\n", "\n    ")


def get_logger(process_name: str) -> logging.Logger:
    """The logger of a process (or of a part of it), such as `learner[0]`; made once for each name."""
    logger = logging.getLogger(f"pronk.{process_name}")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_OneLine(f"%(asctime)s {process_name} %(levelname)s %(message)s", "%H:%M:%S"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    return logger
