"""The journal from which a killed actor continues: the tickets that it was playing, and every answer of its engines.

One file for each ticket, in a folder of one actor: records of

    length of the payload (4 bytes, little-endian) | XXH3 (64 bits) of the payload | payload (msgpack)

The first is the ticket as a message; then follow an `EngineAnswer` for each answer of an engine, and an empty payload
whenever another process takes over the file. Files are never synced: they survive the end of the process, not that of
the machine. Reading stops at a record that is cut off. If something cannot be written or read, that ticket loses its
journal, but never an episode.
"""

from __future__ import annotations

import contextlib
import logging
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from shared.types import Completion, Ticket, Tickets
from shared.wire.codec import WireError, decode, encode

log = logging.getLogger("actor")
SUFFIX = ".open"
HEAD = struct.Struct("<I8s")
TAKEN_OVER = b""
# Takeovers in a row without a new answer: a ticket that ends its actor again and again is not played a third time.
MAX_TAKEN_OVER = 2


class EngineAnswer(msgspec.Struct, frozen=True, array_like=True):
    """An engine's answer in episode `index` of a ticket, after `turn` earlier answers. `seen` is the digest of the
    environment's fragment before it."""

    index: int
    turn: int
    seen: bytes
    completion: Completion


class OpenTicket(NamedTuple):
    """A ticket that was being played, and the answers of each of its episodes in order."""

    ticket: Ticket
    answers: dict[int, list[EngineAnswer]]


class Journal:
    """The journal of one actor in `folder`. It starts with the files that an earlier process of the actor has left
    there, and holds at most `max_bytes`: tickets beyond that are played without a journal.

    The constructor raises OSError if the folder cannot be used at all.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._sizes: dict[Path, int] = {}  # sizes of the files being written
        self._taken_over: dict[str, OpenTicket] = {}  # tickets left by the earlier process
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.glob(f"*{SUFFIX}")):
            self._take_over(path)

    def tickets(self) -> tuple[Ticket, ...]:
        """Return the tickets that the earlier process was playing."""
        return tuple(open_ticket.ticket for open_ticket in self._taken_over.values())

    def answers(self, ticket_id: str, index: int) -> list[EngineAnswer]:
        """Return the answers of an episode that the earlier process began; none for a new one."""
        open_ticket = self._taken_over.get(ticket_id)
        return open_ticket.answers.get(index, []) if open_ticket is not None else []

    def begin(self, ticket: Ticket) -> None:
        """Start a ticket's file, unless it was taken over. Call it before the ticket's first episode."""
        path = self._path(ticket.id)
        if path not in self._sizes:
            self._sizes[path] = 0
            try:
                self._append(path, msgspec.msgpack.encode(encode(Tickets((ticket,)))))
            except WireError as error:
                self._give_up(path, str(error))

    def add(self, ticket_id: str, answer: EngineAnswer) -> None:
        """Append an engine's answer. Call it as soon as the answer is there."""
        path = self._path(ticket_id)
        if path in self._sizes:
            self._append(path, msgspec.msgpack.encode(answer))

    def end(self, ticket_ids: Iterable[str]) -> None:
        """Remove the files of these tickets: the learner has their groups, or does not want them."""
        for ticket_id in ticket_ids:
            self._taken_over.pop(ticket_id, None)
            self._forget(self._path(ticket_id))

    def close(self) -> None:
        """Remove all files: the actor leaves, and its tickets go to other actors."""
        for path in list(self._sizes):
            self._forget(path)

    def _path(self, ticket_id: str) -> Path:
        return self._folder / f"{xxhash.xxh3_128_hexdigest(ticket_id.encode())}{SUFFIX}"

    def _append(self, path: Path, payload: bytes) -> None:
        record = HEAD.pack(len(payload), xxhash.xxh3_64_digest(payload)) + payload
        if sum(self._sizes.values()) + len(record) > self._max_bytes:
            self._give_up(path, f"beyond actor.journal_mb = {self._max_bytes / 2**20:g}")
            return
        try:
            with path.open("ab", buffering=0) as file:
                if file.write(record) != len(record):
                    raise OSError("no space left")
        except OSError as error:
            self._give_up(path, str(error))
        else:
            self._sizes[path] += len(record)

    def _give_up(self, path: Path, reason: str) -> None:
        log.warning("a ticket is played without a journal: %s", reason)
        self._forget(path)

    def _forget(self, path: Path) -> None:
        if self._sizes.pop(path, None) is not None:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def _take_over(self, path: Path) -> None:
        """Take over a file with its complete records; remove it if it is not usable."""
        self._sizes[path] = 0
        try:
            data = path.read_bytes()
            payloads = list(whole_records(data))
            size = sum(HEAD.size + len(payload) for payload in payloads)
            if size < len(data):
                with path.open("r+b") as file:
                    file.truncate(size)
            open_ticket = read_ticket(payloads)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            self._give_up(path, f"{path.name}: {error}")
            return
        self._sizes[path] = size
        if payloads[-MAX_TAKEN_OVER:] == [TAKEN_OVER] * MAX_TAKEN_OVER:
            log.error("ticket %s is given up: its actor ended again and again without a turn", open_ticket.ticket.id)
            self._forget(path)
            return
        self._taken_over[open_ticket.ticket.id] = open_ticket
        self._append(path, TAKEN_OVER)


def whole_records(data: bytes) -> Iterator[bytes]:
    """Yield the payloads of the records before the first one that is cut off or damaged."""
    at = 0
    while at + HEAD.size <= len(data):
        length, checksum = HEAD.unpack_from(data, at)
        payload = data[at + HEAD.size : at + HEAD.size + length]
        if len(payload) != length or xxhash.xxh3_64_digest(payload) != checksum:
            return
        yield payload
        at += HEAD.size + length


def read_ticket(payloads: list[bytes]) -> OpenTicket:
    """Return the ticket and answers in a file's payloads. A new answer for a turn replaces earlier answers from that
    turn on. Raise ValueError or MsgspecError for payloads that are not a journal's."""
    if not payloads:
        raise ValueError("it holds no ticket")
    message = decode(msgspec.msgpack.decode(payloads[0], type=list[bytes]))
    if not isinstance(message, Tickets):
        raise ValueError(f"it begins with {type(message).__name__}")
    answers: dict[int, list[EngineAnswer]] = {}
    for payload in payloads[1:]:
        if payload != TAKEN_OVER:
            answer = msgspec.msgpack.decode(payload, type=EngineAnswer)
            answers.setdefault(answer.index, [])[answer.turn :] = [answer]
    return OpenTicket(message.tickets[0], answers)
