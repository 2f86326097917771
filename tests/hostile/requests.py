"""What comes to an engine's HTTP socket: bytes that are no request, requests without a key, and, with the key, bodies
that no client of ours would send."""

from __future__ import annotations

import http.client
import json
import random
import socket
from collections import deque
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

from shared.engine.engine_messages import generate_body
from shared.types import Image, Sampling
from shared.wire.codec import TokenRules
from tests.fuzz.mutations import bend_bytes, nodes
from tests.hostile.attack import Kind
from tests.hostile.images import drawn, hostile

TIMEOUT_S = 20.0
HELD = 12  # connections that stay open at once, and never go on
ODD: tuple[Any, ...] = (
    None, True, -1, 0, 2**31, 2**63, 10**400, -0.0, 1e-46, 1e308, float("nan"), float("inf"), "", "x" * 10_000, "\x00",
    [], {}, [[]], [None] * 1000, {"a": {}}, [-1], [2**40], {"0": float("nan")}, {"-1": 1}, {"x": 1}, [{}] * 10,
)  # fmt: skip
PATHS = (
    "/generate", "/abort_request", "/weights_checker", "/get_weights_by_name", "/pause_generation",
    "/begin_weight_update", "/update_weights_from_distributed", "/end_weight_update", "/init_weights_update_group",
    "/destroy_weights_update_group", "/flush_cache", "/continue_generation", "/health", "/model_info", "/server_info",
    "/", "/../etc/passwd", "/generate?x=1", "/%00", "//generate", "*",
)  # fmt: skip
BODIES: dict[str, tuple[Any, ...]] = {  # of routes whose sound bodies would stop the run by right of the key
    "/abort_request": ({}, {"rid": 5}, {"rid": "x" * 10_000}, {"rid": "nobody"}, []),
    "/weights_checker": ({"action": "x"}, {"skip_tensor_list": [1]}, {"skip_tensor_list": ["x"] * 10_000}, {}),
    "/get_weights_by_name": ({"name": "x"}, {"name": "model.language_model.norm.weight", "truncate_size": -2}, {}),
    "/pause_generation": ({"mode": "x"}, {"mode": 1}, [], "abort"),
    "/init_weights_update_group": (
        {}, {"master_address": 1}, {"master_address": "x", "master_port": "x", "rank_offset": 1, "world_size": 2},
    ),
    "/destroy_weights_update_group": ({}, {"group_name": "x"}, {"group_name": 5}),
    "/update_weights_from_distributed": (
        {}, {"names": [], "dtypes": [], "shapes": [], "load_format": "flattened_bucket"}, {"names": ["x"]},
        {"names": ["x"], "dtypes": ["float32"], "shapes": [[2**40]], "load_format": "flattened_bucket"},
    ),
    "/end_weight_update": ({"weight_version": 5}, [], {"discard": "x"}, {"weight_version": "77"}),
    "/continue_generation": ([], {"x": 1}, None),
    "/flush_cache": ([], {"x": 1}),
}  # fmt: skip


class Engines:
    """The engines' real ports, their key, and the tokens of their model."""

    def __init__(self, ports: Sequence[int], api_key: str, rules: TokenRules) -> None:
        self._ports, self._key, self._rules = ports, api_key, rules
        self._held: deque[socket.socket] = deque()

    # -------------------------------------------------------------- requests, before the key is looked at

    def request_kinds(self) -> list[Kind]:
        makers = (self.noise, self.half, self.oversized, self.lying, self.chunked, self.without_key, self.pipelined)
        return [*(partial(self._say, make) for make in makers), self.hang_up]

    def _say(self, make: Callable[[random.Random], bytes], rng: random.Random) -> str | None:
        connection = socket.create_connection(("127.0.0.1", rng.choice(self._ports)), timeout=TIMEOUT_S)
        connection.sendall(make(rng))
        if rng.random() < 0.3:
            self._held.append(connection)
            if len(self._held) > HELD:
                self._held.popleft().close()
            return None
        with connection:
            connection.settimeout(1.0)
            try:
                answer = connection.recv(4096)
            except TimeoutError:
                return None
        status = answer[9:12].decode("ascii", "replace") if answer.startswith(b"HTTP/1.") else "closed"
        if status == "200":
            return None
        return f"http: {status}"

    def noise(self, rng: random.Random) -> bytes:
        return rng.choice(
            (rng.randbytes(500), b"\x16\x03\x01\x02\0\x01\0\x01\xfc" + bytes(500), b"GET /health\r\n", b"\r\n" * 500)
        )

    def half(self, rng: random.Random) -> bytes:
        whole = self._head("/generate", 1000) + b'{"input_ids": [1'
        return whole[: rng.randrange(1, len(whole))]

    def oversized(self, rng: random.Random) -> bytes:
        long = b"x" * rng.choice((5000, 2**20))
        return rng.choice(
            (
                b"GET /" + long + b" HTTP/1.1\r\n\r\n",
                b"GET /health HTTP/1.1\r\nx: " + long + b"\r\n\r\n",
                b"GET /health HTTP/1.1\r\n" + b"".join(b"x%d: y\r\n" % n for n in range(3000)) + b"\r\n",
                self._head("/health", 2**23) + bytes(2**23),
            )
        )

    def lying(self, rng: random.Random) -> bytes:
        length = rng.choice((b"-1", b"99999999999999999999", b"x", b"1\r\ncontent-length: 2", b"0x10", b""))
        return b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: " + length + b"\r\n\r\n{}"

    def chunked(self, rng: random.Random) -> bytes:
        chunks = rng.choice((b"1\r\nx\r\n" * 5000, b"fffffffffffff\r\n", b"zz\r\n", b"5\r\n{}"))
        return self._head("/generate", None) + chunks

    def without_key(self, rng: random.Random) -> bytes:
        wrong = rng.choice(
            (
                b"",
                b"authorization: Bearer x\r\n",
                b"authorization: \xff\xfe\r\n",
                b"authorization: Basic " + b"x" * 3000 + b"\r\n",
            )
        )
        path, method = rng.choice(PATHS).encode(), rng.choice((b"GET", b"POST", b"PUT", b"OPTIONS", b"X" * 50))
        return method + b" " + path + b" HTTP/1.1\r\nhost: x\r\n" + wrong + b"content-length: 2\r\n\r\n{}"

    def pipelined(self, rng: random.Random) -> bytes:
        return b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * rng.choice((50, 1000)) + bytes(rng.choice((0, 2**20)))

    def hang_up(self, rng: random.Random) -> str | None:
        """Asks for an answer and does not wait for it."""
        body = json.dumps(self._generate(rng)).encode()
        with socket.create_connection(("127.0.0.1", rng.choice(self._ports)), timeout=TIMEOUT_S) as connection:
            connection.sendall(self._head("/generate", len(body)) + body)
            connection.settimeout(rng.uniform(0.0001, 0.05))
            try:
                connection.recv(1)
            except TimeoutError:
                return None
        return None

    def _head(self, path: str, length: int | None) -> bytes:
        size = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
        return f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {self._key}\r\n{size}\r\n\r\n".encode()

    # -------------------------------------------------------------- bodies, with the key

    def body_kinds(self) -> list[Kind]:
        makers = (self.bent, self.bent, self.bent, self.deep, self.bytes_of_another_kind, self.long)
        return [*(partial(self._post, "/generate", make) for make in makers), self.other_route]

    def image_kinds(self) -> list[Kind]:
        return [partial(self._post, "/generate", self.with_images)]

    def _post(self, path: str, make: Callable[[random.Random], bytes], rng: random.Random) -> str | None:
        connection = http.client.HTTPConnection("127.0.0.1", rng.choice(self._ports), timeout=TIMEOUT_S)
        try:
            headers = {
                "authorization": f"Bearer {self._key}",
                "content-type": rng.choice(("application/json", "text/plain", "")),
            }
            connection.request("POST", path, make(rng), headers)
            answer = connection.getresponse()
            answer.read()
            return None if answer.status == 200 else f"http: {answer.status}"
        finally:
            connection.close()

    def _generate(self, rng: random.Random) -> dict[str, Any]:
        images = [Image.of(drawn("PNG"))] * rng.choice((0, 1))
        ids = [1, 2, *[self._rules.placeholder_id] * len(images), 3]
        return generate_body(
            ids, images, Sampling(1.0), self._rules.banned_ids, max_new_tokens=rng.choice((1, 4, 64)), seed=1
        )

    def bent(self, rng: random.Random) -> bytes:
        """One to three places of a sound body replaced, removed or added."""
        body = self._generate(rng)
        for _ in range(rng.randint(1, 3)):
            container, key = rng.choice(nodes(body) or [(body, "input_ids")])
            if rng.random() < 0.8:
                container[key] = deepcopy(rng.choice(ODD))  # type: ignore[index]
            else:
                del container[key]  # type: ignore[arg-type]
        body.setdefault("rid", rng.choice((None, "same", 5)))
        return json.dumps(body).encode()

    def deep(self, rng: random.Random) -> bytes:
        return rng.choice((b"[", b'{"a":', b'{"input_ids":[')) * rng.choice((100, 100_000))

    def bytes_of_another_kind(self, rng: random.Random) -> bytes:
        return rng.choice(
            (
                rng.randbytes(1000),
                b"",
                b"null",
                b"\xff\xfe{}",
                bend_bytes(json.dumps(self._generate(rng)).encode(), rng),
            )
        )

    def long(self, rng: random.Random) -> bytes:
        count = rng.choice((200, 10_000, 1_000_000))
        key = rng.choice(("input_ids", "token_ids_logprob", "image_data"))
        return json.dumps(
            self._generate(rng) | {key: [1] * count if key != "image_data" else ["x"] * (count // 10)}
        ).encode()

    def with_images(self, rng: random.Random) -> bytes:
        images = [Image.of(hostile(rng)) for _ in range(rng.choice((1, 1, 4)))]
        ids = [1, *[self._rules.placeholder_id] * rng.choice((len(images), 1)), 3]
        return json.dumps(generate_body(ids, images, Sampling(1.0))).encode()

    def other_route(self, rng: random.Random) -> str | None:
        path = rng.choice(list(BODIES))
        return self._post(path, lambda _: json.dumps(rng.choice(BODIES[path])).encode(), rng)
