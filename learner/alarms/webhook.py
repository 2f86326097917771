"""A webhook for alarms, posted from a thread beside training, with limits on the queue and on each request."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from shared.log import get_logger

TIMEOUT_S = 5.0
WAITING = 32


class Webhook:
    """Posts alarms to a URL. `post` never waits; alarms that could not be posted are counted in `failed`. Neither log
    nor errors contain the URL, whose path or query is often a secret."""

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S) -> None:
        parts = urlsplit(url)
        self.failed = 0
        self._url, self._where, self._timeout_s = url, f"{parts.scheme}://{parts.hostname}", timeout_s
        self._waiting: queue.Queue[dict[str, Any] | None] = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._run, name="webhook", daemon=True)
        self._thread.start()

    def post(self, content: dict[str, Any]) -> None:
        try:
            self._waiting.put_nowait(content)
        except queue.Full:
            self.failed += 1

    def close(self) -> None:
        """Wait for the queued alarms, up to the time limit of a request."""
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join(self._timeout_s + 1)

    def _run(self) -> None:
        while (content := self._waiting.get()) is not None:
            try:
                self._post(json.dumps(content).encode())
            except Exception as error:  # noqa: BLE001 - training continues whatever a server or the network does
                self.failed += 1
                get_logger("alarms").warning(
                    "alarms.webhook: %s did not take alarm %s: %s; %d so far",
                    self._where, content.get("rule"), getattr(error, "code", type(error).__name__), self.failed,
                )  # fmt: skip

    def _post(self, body: bytes) -> None:
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self._url, data=body, headers=headers, method="POST")
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=self._timeout_s):
            pass


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: a redirected POST would become a GET without content."""

    def redirect_request(self, *_: Any) -> None:
        return None
