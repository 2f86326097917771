"""Images of a dataset that stand at http(s) addresses: downloaded once, into a folder."""

from __future__ import annotations

import hashlib
import os
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shared.redaction import redact_text
from shared.util.http_status import RETRY_STATUS

MAX_BYTES = 64 << 20  # of one image
MAX_FOLDER_BYTES = 100 << 30
CONNECT_S = 10.0
IMAGE_S = 60.0  # for one image, in all
TRIES = 3
FIRST_PAUSE_S = 0.5
AT_ONCE = 16
MAX_FAILURES = 8  # of a host in a row, after which it is left alone


class ImageFolder:
    """The downloaded images in a folder, by address. An address that failed is not asked for again."""

    def __init__(self, folder: str | Path) -> None:
        """Raise ValueError if the folder cannot be made, or is full."""
        self._folder = Path(folder)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._bytes = sum(entry.stat().st_size for entry in os.scandir(self._folder) if entry.is_file())
        except OSError as error:
            raise ValueError(f"data.image_cache = {str(folder)!r}: {error.strerror or error}") from None
        self._failed: dict[str, str] = {}
        self._failures: Counter[str] = Counter()
        self._opener = urllib.request.build_opener(_OnlyHttp)

    def fetch(self, urls: Iterable[str]) -> None:
        """Download what is not there yet, several at once."""
        missing = [url for url in dict.fromkeys(urls) if not self._place(url).is_file() and url not in self._failed]
        if missing:
            with ThreadPoolExecutor(AT_ONCE) as threads:
                list(threads.map(self._fetch, missing))

    def read(self, url: str) -> bytes:
        """Return the bytes at an address. Raise ValueError if they cannot be had."""
        self.fetch([url])
        if reason := self._failed.get(url):
            raise ValueError(reason)
        return self._place(url).read_bytes()

    def _place(self, url: str) -> Path:
        return self._folder / hashlib.sha256(url.encode()).hexdigest()

    def _fetch(self, url: str) -> None:
        host = urlsplit(url).netloc
        try:
            if self._failures[host] >= MAX_FAILURES:
                raise ValueError(f"its host has failed {MAX_FAILURES} times in a row, and is left alone")
            if self._bytes > MAX_FOLDER_BYTES:
                raise ValueError(f"{self._folder} has over {MAX_FOLDER_BYTES >> 30} GiB: empty it")
            data = self._download(url)
            self._failures[host] = 0
            self._bytes += len(data)
            unfinished = self._place(url).with_suffix(f".{os.getpid()}")
            unfinished.write_bytes(data)
            unfinished.replace(self._place(url))
        except Exception as error:  # noqa: BLE001 - whatever a server does costs its image alone
            self._failures[host] += 1
            self._failed[url] = f"{redact_text(url)[:200]!r} cannot be downloaded: {' '.join(str(error).split())[:200]}"

    def _download(self, url: str) -> bytes:
        deadline = time.monotonic() + IMAGE_S
        for attempt in range(TRIES):
            try:
                return self._content(url, deadline)
            except urllib.error.HTTPError as error:
                if error.code not in RETRY_STATUS or attempt == TRIES - 1:
                    raise
            except (OSError, TimeoutError):
                if attempt == TRIES - 1:
                    raise
            time.sleep(FIRST_PAUSE_S * 2**attempt)
        raise AssertionError

    def _content(self, url: str, deadline: float) -> bytes:
        request = urllib.request.Request(url, headers={"User-Agent": "pronk"})
        with self._opener.open(request, timeout=CONNECT_S) as response:
            data = bytearray()
            while part := response.read(1 << 16):
                data += part
                if len(data) > MAX_BYTES:
                    raise ValueError(f"it has more than {MAX_BYTES >> 20} MiB")
                if time.monotonic() > deadline:
                    raise ValueError(f"it takes more than {IMAGE_S:g} s")
            return bytes(data)


class _OnlyHttp(urllib.request.HTTPRedirectHandler):
    """Follows a few redirections, to http(s) addresses alone."""

    max_redirections = 5

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if not newurl.lower().startswith(("http://", "https://")):
            raise urllib.error.URLError(f"it leads to {newurl[:80]!r}")
        return super().redirect_request(req, fp, code, msg, headers, newurl)
