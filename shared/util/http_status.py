"""What an HTTP status says about trying again."""

from __future__ import annotations

RETRY_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
"""The server is busy or broken for a while."""
