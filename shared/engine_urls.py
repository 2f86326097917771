"""The allowed form of engine URLs on the wire: actors send their engines' URLs to the learner, and the learner sends
them to actors that have no engines."""

from __future__ import annotations

import re
from collections.abc import Sequence

MAX_ENGINES = 2**10  # engines that one actor may name, or be given
ENGINE_URL = r"\Ahttp://[A-Za-z0-9_.\-\[\]:]+(/[A-Za-z0-9_.\-/]*)?\Z"


def engine_urls_error(urls: Sequence[str]) -> str:
    """Return why an actor cannot have these engine URLs; "" if it can."""
    if len(urls) > MAX_ENGINES:
        return f"{len(urls)} engines; one actor may name {MAX_ENGINES}"
    wrong = [url[:200] for url in urls if not re.search(ENGINE_URL, url)]
    return f"engine url {wrong[0]!r}: write it as http://host:port" if wrong else ""
