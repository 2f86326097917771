"""The interface of a transport: the learner's end, an actor's end, and their settings and keys.

A transport carries messages whole, in order and at most once over a connection. It may lose messages under way when a
connection ends: learner and actors repeat a message that gets no answer. Sending never waits: when a peer fetches too
slowly, `send` reports that the message was not sent. Messages are encoded by `shared.wire.codec`, so that its checks
and limits hold for every transport. `shared.wire.transports` chooses a transport by the scheme of an address.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from shared.log import get_logger

if TYPE_CHECKING:  # a recipe, whose addresses are checked here, loads without numpy
    from shared.types import Message
    from shared.wire.frames import Frame, Limits

LOOK_EVERY_S = 1.0


class Delivery(Enum):
    """What became of a message to a peer."""

    SENT = "sent"
    FULL = "full"  # the peer's queue is full, the message is lost
    GONE = "gone"  # there is no connection to the peer


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    """Bounds of one end: a message above `max_message_bytes` is refused, and so is one for a full outgoing queue."""

    max_message_bytes: int = 256 * 2**20
    queue_messages: int = 64
    # A connection that is silent for three times this long is closed and made again.
    keepalive_s: float = 10.0


DEFAULT_SETTINGS = EndpointSettings()


class HalfWritten(ValueError):
    """A file is not a whole allow-list: somebody is still writing it, or has made a mistake in it."""


class AllowList:
    """The actors' public keys (Z85) and names in a file, which is read again soon after it has changed.

    An empty, missing or unreadable file lets nobody in. While a file is half written (`read` raises HalfWritten), the
    previous list stays in force. Either is reported once. The constructor raises what `read` raises.
    """

    def __init__(self, path: Path, read: Callable[[Path], dict[bytes, str]]) -> None:
        self._path = path
        self._read = read
        self._log = get_logger("auth")
        self._stamp = self._stat()
        self._next_look = 0.0
        self.keys = read(path)

    def refresh(self) -> None:
        """Read the file again if it has changed; check at most once every `LOOK_EVERY_S` seconds."""
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
        except HalfWritten as error:
            self._log.error("the allow-list stays as it was until it can be read as a whole: %s", error)
            return
        except ValueError as error:
            self._log.error("the allow-list lets nobody in: %s", error)
            keys = {}
        added = ", ".join(sorted(keys[key] for key in keys.keys() - self.keys.keys()))
        removed = ", ".join(sorted(self.keys[key] for key in self.keys.keys() - keys.keys()))
        self._log.info("the allow-list has changed: added %s; removed %s", added or "nobody", removed or "nobody")
        self.keys = keys

    def _stat(self) -> tuple[int, int, int]:
        with suppress(OSError):
            status = self._path.stat()
            return status.st_mtime_ns, status.st_size, status.st_ino
        return 0, 0, 0


@dataclass(frozen=True, slots=True)
class LearnerKeys:
    """The learner's key pair, Z85, and the public keys of the actors that it serves."""

    public: bytes
    secret: bytes = field(repr=False)
    allowed: AllowList


@dataclass(frozen=True, slots=True)
class ActorKeys:
    """An actor's key pair and the learner's public key, Z85."""

    public: bytes
    secret: bytes = field(repr=False)
    learner: bytes


class LearnerEndpoint(Protocol):
    """The learner's end. One thread uses it, not necessarily the thread that made it; any thread may call `wake`.

    A peer is identified by bytes that begin with its actor's name and a `#`, and are unique to its process.
    """

    address: str  # the address to which actors connect
    limits: Limits  # limits of one message

    @property
    def refused(self) -> Mapping[str, int]:
        """Refused connections and messages by reason, for the metrics."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Wait for a message or a call of `wake`, for at most `timeout_s`; tell whether a message is there."""
        ...

    def wake(self) -> None:
        """End the running `wait` soon, or the next one at once. Never blocks, not even after `close`."""
        ...

    def receive(self) -> tuple[bytes, Sequence[Frame]] | None:
        """Return the peer and the frames of a waiting message, still encoded; None if none is waiting."""
        ...

    def send(self, peer: bytes, message: Message) -> Delivery:
        """Send without waiting. Raise WireError for a message that cannot be sent."""
        ...

    def close(self) -> None: ...


class ActorEndpoint(Protocol):
    """An actor's end, for one asyncio loop."""

    async def send(self, message: Message) -> bool:
        """Send without waiting; return False if no learner is connected or the queue is full. Raise WireError for a
        message that cannot be sent."""
        ...

    async def receive(self, timeout_s: float) -> Message | None:
        """Return the next message, or None after `timeout_s` at most. Raise WireError for a message that breaks the
        contract."""
        ...

    def trouble(self) -> str:
        """Return why the learner refuses this actor, as far as the connection shows it; "" if it is not refused."""
        ...

    def close(self, linger_s: float = 0.0) -> None:
        """Close the end; wait up to `linger_s` seconds for outgoing messages to be sent."""
        ...


class Transport(Protocol):
    """One way to carry messages, with its own form of addresses. Every ValueError is one line that names the field."""

    form: str  # the form of its addresses, such as tcp://HOST:PORT

    def check_address(self, field: str, address: str) -> None:
        """Raise ValueError unless a learner can listen at `address` and actors can call it."""
        ...

    def is_local(self, address: str) -> bool:
        """Tell whether traffic to this address stays on this machine, so that no keys are needed. Does not resolve
        names."""
        ...

    def taken_port(self, bind: str, host: str) -> int:
        """Return the TCP port on `host` that a learner bound to `bind` occupies, so that no other server can use it; 0
        if none."""
        return 0

    def listen(self, address: str, settings: EndpointSettings, keys: LearnerKeys | None) -> LearnerEndpoint:
        """Open the learner's end. Raise ValueError if the address cannot be used."""
        ...

    def connect(self, address: str, name: str, settings: EndpointSettings, keys: ActorKeys | None) -> ActorEndpoint:
        """Open an actor's end; `name` is the actor's. The learner may start later. Raise ValueError as `listen`
        does."""
        ...
