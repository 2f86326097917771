"""Authentication of actors: CURVE keys of a socket, and the learner's ZAP handler, which libzmq asks (RFC 27).

An actor is served only if it knows the learner's public key and its own public key is on the allow-list. libzmq refuses
everybody else before it reads a message of theirs. The thread that owns the socket also serves its ZAP handler. A
connected actor whose key is revoked stays connected, since libzmq closes no single connection; the handler then refuses
each of its messages.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from shared.guards.connections import FAILURES, UNKNOWN
from shared.log import get_logger

ZAP_DOMAIN = b"pronk"
ZAP_ADDRESS = "inproc://zeromq.zap.01"  # one for each context, as libzmq fixes it
MAX_LOGGED = 1000
LOOK_EVERY_S = 1.0
PER_ANSWER = 256  # a flood of strangers must not keep the learner from its actors
_WORDS: dict[int, str] = {
    zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC: "its handshake is not encrypted for this learner's key, or is an old one",
}


class AllowList:
    """The actors' public keys (Z85) and names in a file, which is read again soon after it has changed.

    A change that cannot be read is reported once, and the former list stays. The constructor raises what `read` raises.
    """

    def __init__(self, path: Path, read: Callable[[Path], dict[bytes, str]]) -> None:
        self._path, self._read = path, read
        self._log = get_logger("auth")
        self._stamp = self._stat()
        self._next_look = 0.0
        self.keys = read(path)

    def refresh(self) -> None:
        """Reads the file again if it has changed; looks at it once in `LOOK_EVERY_S`."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_EVERY_S
        stamp = self._stat()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            keys = self._read(self._path)
        except ValueError as error:
            self._log.error("the allow-list stays as it was: %s", error)
            return
        added = ", ".join(sorted(keys[key] for key in keys.keys() - self.keys.keys()))
        removed = ", ".join(sorted(self.keys[key] for key in self.keys.keys() - keys.keys()))
        self._log.info("the allow-list has changed: added %s; removed %s", added or "nobody", removed or "nobody")
        self.keys = keys

    def _stat(self) -> tuple[int, int, int]:
        with suppress(OSError):
            found = self._path.stat()
            return found.st_mtime_ns, found.st_size, found.st_ino
        return 0, 0, 0


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """An actor's keys, Z85; called with a socket before it connects."""

    public: bytes
    secret: bytes = field(repr=False)
    server: bytes

    def __call__(self, socket: zmq.Socket) -> None:
        socket.curve_publickey, socket.curve_secretkey, socket.curve_serverkey = self.public, self.secret, self.server


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """The learner's keys, Z85, and the actors' public keys; called with a socket before it binds."""

    public: bytes
    secret: bytes = field(repr=False)
    allowed: AllowList

    def __call__(self, socket: zmq.Socket) -> ZapHandler:
        socket.curve_publickey, socket.curve_secretkey, socket.curve_server = self.public, self.secret, True
        socket.zap_domain = ZAP_DOMAIN
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a handler every handshake fails
        return ZapHandler(socket.context, self.allowed)


class ZapHandler:
    """Tells libzmq for each client whether its key is on the list; counts refused clients and logs each once. It is
    told the events of the socket's connections (`note`), which another thread may do."""

    def __init__(self, context: zmq.Context, allowed: AllowList) -> None:
        self.refused: Counter[str] = Counter()
        self._allowed = allowed
        self._log = get_logger("auth")
        self._logged: set[tuple[str, str]] = set()  # address, mistake
        self._lock = threading.Lock()  # guards what is counted and logged
        self._failed: int | None = None  # the code of a handshake whose connection closes next
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(ZAP_ADDRESS)

    def answer(self) -> None:
        """Answers the handshakes that are waiting. Never waits."""
        self._allowed.refresh()
        with suppress(zmq.Again):
            for _ in range(PER_ANSWER):
                self.socket.send_multipart(self._verdict(self.socket.recv_multipart(zmq.NOBLOCK)))

    def owns(self, message: zmq.Frame) -> bool:
        """Whether the key of its sender, as libzmq knows it, is still on the list."""
        key = message.get("User-Id")
        if str(key).encode() in self._allowed.keys:
            return True
        self._refuse("revoked", str(message.get("Peer-Address")), f"its key {key} is no longer allowed")
        return False

    def close(self) -> None:
        self.socket.close(0)

    def _verdict(self, request: list[bytes]) -> list[bytes]:
        version, number, domain, address, _, mechanism, *credentials = request
        if domain == ZAP_DOMAIN and mechanism == b"CURVE" and len(credentials) == 1 and len(credentials[0]) == 32:
            key = z85.encode(credentials[0])
            if key in self._allowed.keys:
                return [version, number, b"200", b"OK", key, b""]
            self._refuse("key", address.decode("ascii", "replace"), f"its key {key.decode()} is not allowed")
        return [version, number, b"400", b"not allowed", b"", b""]

    def note(self, event: Mapping[str, Any], host: str) -> None:
        """A connection of `host` was accepted or has ended, or a handshake has failed."""
        kind, value = event["event"], event["value"]
        if kind == zmq.EVENT_DISCONNECTED:
            if self._failed is not None:
                words = _WORDS.get(self._failed, "its handshake broke off: it has no keys, or repeats an old one")
                self._refuse("handshake", host, words)
                self._failed = None
        elif kind in (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
            self._failed = value  # `_verdict` has counted those of strangers' keys

    def _refuse(self, reason: str, host: str, words: str) -> None:
        """Counts a refused client, and logs it once for each address and mistake. A client whose address was not known
        in time counts as the next one with the same mistake."""
        with self._lock:
            self.refused[reason] += 1
            known = (host, words) in self._logged or (host == UNKNOWN and any(w == words for _, w in self._logged))
            if not known and (UNKNOWN, words) in self._logged:
                self._logged.discard((UNKNOWN, words))
                known = True
                self._logged.add((host, words))
            if not known and len(self._logged) < MAX_LOGGED:
                self._logged.add((host, words))
                self._log.warning("refused a client at %s: %s (further tries are only counted)", host, words)


class HandshakeMonitor:
    """Watches an actor's own handshakes: `trouble` says why none succeeds, "" as long as none has failed."""

    def __init__(self, dealer: zmq.Socket) -> None:
        self._dealer, self._trouble = dealer, ""
        self._events = dealer.get_monitor_socket(FAILURES | zmq.EVENT_HANDSHAKE_SUCCEEDED)

    def trouble(self) -> str:
        with suppress(zmq.Again):
            while True:
                kind = parse_monitor_message(self._events.recv_multipart(zmq.NOBLOCK))["event"]
                if kind == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._trouble = ""
                elif kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    self._trouble = "it refuses this actor's key; add the key to its allow-list"
                else:
                    self._trouble = "the handshake fails: transport.keys must be the learner's, or empty on both ends"
        return self._trouble

    def close(self) -> None:
        self._dealer.disable_monitor()
        self._events.close(0)
