"""Authentication of actors: the CURVE keys of a socket, and the learner's ZAP handler, which decides for libzmq who may
connect (RFC 27).

An actor is served only if it knows the learner's public key and its own public key is on the allow-list. libzmq refuses
everybody else before it reads any of their messages. The thread that owns the socket also serves its ZAP handler. A
connected actor whose key is revoked stays connected, since libzmq closes no single connection; the handler then refuses
each of its messages.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from shared.log import get_logger
from shared.wire.connections import FAILURES, UNKNOWN
from shared.wire.endpoints import ActorKeys, AllowList, LearnerKeys

ZAP_DOMAIN = b"pronk"
ZAP_ADDRESS = "inproc://zeromq.zap.01"  # fixed by libzmq: one such address in each context
MAX_LOGGED = 1000
PER_ANSWER = 256  # a flood of strangers must not keep the learner from its actors
_WORDS: dict[int, str] = {
    zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC: "its handshake is not encrypted for this learner's key, or is an old one",
}


class KeyPair(NamedTuple):
    """A public key and its secret, Z85."""

    public: str
    secret: str


def make_key_pair() -> KeyPair:
    """Make a CURVE key pair."""
    return KeyPair(*(key.decode() for key in zmq.curve_keypair()))


def public_key_of(secret: str) -> str:
    """Return the public key that belongs to a secret key; both are Z85."""
    return zmq.curve_public(secret.encode()).decode()


def use_actor_keys(socket: zmq.Socket, keys: ActorKeys) -> None:
    """Encrypt an actor's socket. Call it before the socket connects."""
    socket.curve_publickey = keys.public
    socket.curve_secretkey = keys.secret
    socket.curve_serverkey = keys.learner


def use_learner_keys(socket: zmq.Socket, keys: LearnerKeys) -> ZapHandler:
    """Encrypt the learner's socket and let in only the actors on its allow-list. Call it before the socket binds. From
    then on the caller must keep calling the handler's `answer`, or no handshake is completed."""
    socket.curve_publickey = keys.public
    socket.curve_secretkey = keys.secret
    socket.curve_server = True
    socket.zap_domain = ZAP_DOMAIN
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a handler every handshake fails
    return ZapHandler(socket.context, keys.allowed)


class ZapHandler:
    """Tells libzmq for each client whether its key is on the allow-list; counts refused clients and logs each once. The
    socket's connection events must be passed to `note`; another thread may do that."""

    def __init__(self, context: zmq.Context, allowed: AllowList) -> None:
        self.refused: Counter[str] = Counter()
        self._allowed = allowed
        self._log = get_logger("auth")
        self._logged: set[tuple[str, str]] = set()  # address, mistake
        self._lock = threading.Lock()  # guards the counts and the set of logged mistakes
        self._failed: int | None = None  # error code of a failed handshake whose connection closes next
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(ZAP_ADDRESS)

    def answer(self) -> None:
        """Answer the handshakes that are waiting, without waiting for others."""
        self._allowed.refresh()
        with suppress(zmq.Again):
            for _ in range(PER_ANSWER):
                self.socket.send_multipart(self._verdict(self.socket.recv_multipart(zmq.NOBLOCK)))

    def is_allowed(self, message: zmq.Frame) -> bool:
        """Tell whether the key of a message's sender, as libzmq reports it, is still on the list; count a refusal if
        not."""
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
        """Note that a connection of `host` was accepted or has ended, or that a handshake has failed."""
        kind, value = event["event"], event["value"]
        if kind == zmq.EVENT_DISCONNECTED:
            if self._failed is not None:
                words = _WORDS.get(self._failed, "its handshake broke off: it has no keys, or repeats an old one")
                self._refuse("handshake", host, words)
                self._failed = None
        elif kind in (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
            self._failed = value  # `_verdict` has already counted unknown keys

    def _refuse(self, reason: str, host: str, words: str) -> None:
        """Count a refused client, and log it once for each address and mistake. A client whose address was not known in
        time is taken for the next client with the same mistake."""
        with self._lock:
            self.refused[reason] += 1
            is_logged = (host, words) in self._logged or (host == UNKNOWN and any(w == words for _, w in self._logged))
            if not is_logged and (UNKNOWN, words) in self._logged:
                self._logged.discard((UNKNOWN, words))
                is_logged = True
                self._logged.add((host, words))
            if not is_logged and len(self._logged) < MAX_LOGGED:
                self._logged.add((host, words))
                self._log.warning("refused a client at %s: %s (further tries are only counted)", host, words)


class HandshakeMonitor:
    """Watches an actor's own handshakes. `trouble` returns why none succeeds, or "" as long as none has failed."""

    def __init__(self, dealer: zmq.Socket) -> None:
        self._dealer, self._trouble = dealer, ""
        self._events = dealer.get_monitor_socket(FAILURES | zmq.EVENT_HANDSHAKE_SUCCEEDED)

    def trouble(self) -> str:
        """Return why no handshake succeeds; "" as long as none has failed."""
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
