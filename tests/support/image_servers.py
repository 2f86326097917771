"""Recording the images that a client sends, a proxy, and servers that accept image files."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from base64 import b64decode
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any
from urllib.parse import urlsplit

from shared.engine.engine_api import EngineClient
from shared.engine.sent_images import IMAGES_ROUTE
from shared.types import image_name
from tests.support.engines import says
from tests.support.machine import LocalServer, QuietHandler


class Sent:
    """Records the image files that a client sends, and the images of each request."""

    def __init__(self, client: EngineClient) -> None:
        self.files: list[bytes] = []
        self.shown: list[list[str]] = []
        self._request = client.request
        client.request = self.request  # type: ignore[method-assign]

    async def request(self, method: str, path: str, body: Any = None, **settings: Any) -> Any:
        if path == IMAGES_ROUTE:
            self.files.append(bytes(body))
        elif path == "/generate":
            self.shown.append(body.get("image_data", []))
        return await self._request(method, path, body, **settings)


@contextmanager
def relay(targets: list[str]) -> Iterator[str]:
    """Run a proxy that forwards each new connection to the address that is last in `targets` at that time."""

    def serve(connection: socket.socket) -> None:
        host = urlsplit(targets[-1])
        with closing(connection), socket.create_connection((host.hostname, host.port)) as other:  # type: ignore[arg-type]
            back = threading.Thread(target=copy, args=(other, connection), daemon=True)
            back.start()
            copy(connection, other)
            back.join()

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def copy(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        pass


@contextmanager
def raw_engine(answers: dict[str, Any]) -> Iterator[str]:
    """Run a server that answers each path as `answers` says, and also accepts files."""

    class Handler(QuietHandler):
        def answer(self) -> None:
            data = self.rfile.read(int(self.headers.get("content-length", 0)))
            body = json.loads(data) if data.startswith(b"{") else {}
            answers[self.path](self, body)  # type: ignore[arg-type]

        do_GET = do_POST = answer

    server = LocalServer(Handler)
    try:
        yield server.url
    finally:
        server.close()


def post(url: str, path: str, data: bytes) -> tuple[int, dict[str, Any]]:
    with closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)) as connection:
        connection.request("POST", path, data)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


class FalseSglang:
    """A false engine that keeps files by their computed hash and accepts requests that leave them out, as SGLang's
    server does with --mm-preprocess-cache-size-mb and --trust-mm-content-hashes."""

    def __init__(self, answer: Any) -> None:
        self.kept: set[str] = set()
        self.seen: list[tuple[list[bool], bool]] = []  # per request: (which files it contained, whether it was refused)
        self._answer = answer
        info = {"trust_mm_content_hashes": True, "mm_preprocess_cache_size_mb": 256}
        self.answers = {"/server_info": says(info), IMAGES_ROUTE: says({"detail": "Not Found"}, 404)}
        self.answers["/generate"] = self.generate

    def generate(self, request: Any, body: dict[str, Any]) -> None:
        data = body["image_data"]
        hashes = body.get("mm_content_hashes") or [None] * len(data)
        wrong = False
        for uri, name in zip(data, hashes, strict=True):
            if name not in self.kept:
                found = image_name(b64decode(uri.partition(",")[2]))
                wrong |= name not in (None, found)
                self.kept.add(found)
        self.seen.append(([len(uri) > 10 for uri in data], wrong))
        says({"error": {"message": "content hash mismatch"}} if wrong else self._answer, 400 if wrong else 200)(
            request, body
        )
