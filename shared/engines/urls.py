"""What an engine's URL may be on the wire: actors name their engines to the learner, and the learner names them to
actors that have none."""

from __future__ import annotations

import re
from collections.abc import Sequence

ENGINES = 2**10  # that one actor names, or is told of
ENGINE_URL = r"\Ahttp://[A-Za-z0-9_.\-\[\]:]+(/[A-Za-z0-9_.\-/]*)?\Z"


def unusable(urls: Sequence[str]) -> str:
    """Why an actor cannot have these engines; empty if it can."""
    if len(urls) > ENGINES:
        return f"{len(urls)} engines; one actor may name {ENGINES}"
    wrong = [url[:200] for url in urls if not re.search(ENGINE_URL, url)]
    return f"engine url {wrong[0]!r}: write it as http://host:port" if wrong else ""
