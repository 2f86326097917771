"""What an actor that was killed goes on from: the tickets it was playing, and every answer of its engines.

One file for each ticket, in a folder of one actor: records of

    length of the payload (4 bytes, little-endian) | XXH3 (64 bits) of the payload | payload (msgpack)

first the ticket as a message, then an `Answer` whenever an engine has given one, and an empty payload for each process
that took the file over. Files are never synced: they outlive a process, not the machine. A record that was cut off ends
its file. Whatever cannot be written or read costs the journal of its ticket, never an episode.
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

from shared.codec import WireError, decode, encode
from shared.types import Completion, Ticket, Tickets

log = logging.getLogger("actor")
SUFFIX = ".open"
HEAD = struct.Struct("<I8s")
TAKEN_OVER = b""
MAX_TAKEN_OVER = 2  # in a row without a new answer: what ends its actor again and again is not played a third time


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """What an engine answered in episode `index` of a ticket, after `turn` earlier answers. `seen`: the digest of the
    fragment that the environment had shown before it."""

    index: int
    turn: int
    seen: bytes
    completion: Completion


class OpenTicket(NamedTuple):
    """A ticket that was being played, and the answers of each of its episodes in order."""

    ticket: Ticket
    answers: dict[int, list[Answer]]


class Journal:
    """Takes over what an earlier process of this actor has left in `folder`. Holds `max_bytes` at most: a ticket beyond
    them is played without a journal. OSError if the folder cannot be used at all."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._sizes: dict[Path, int] = {}  # of the tickets that are recorded
        self._found: dict[str, OpenTicket] = {}  # left by the earlier process
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.glob(f"*{SUFFIX}")):
            self._take_over(path)

    def tickets(self) -> tuple[Ticket, ...]:
        """What the earlier process was playing."""
        return tuple(found.ticket for found in self._found.values())

    def answers(self, ticket_id: str, index: int) -> list[Answer]:
        """Of an episode that the earlier process began; empty for a new one."""
        found = self._found.get(ticket_id)
        return found.answers.get(index, []) if found is not None else []

    def begin(self, ticket: Ticket) -> None:
        """Before its first episode; nothing for a ticket that was taken over."""
        path = self._path(ticket.id)
        if path not in self._sizes:
            self._sizes[path] = 0
            try:
                self._append(path, msgspec.msgpack.encode(encode(Tickets((ticket,)))))
            except WireError as error:
                self._give_up(path, str(error))

    def add(self, ticket_id: str, answer: Answer) -> None:
        """As soon as the answer is there."""
        path = self._path(ticket_id)
        if path in self._sizes:
            self._append(path, msgspec.msgpack.encode(answer))

    def end(self, ticket_ids: Iterable[str]) -> None:
        """The learner has these groups, or does not want them."""
        for ticket_id in ticket_ids:
            self._found.pop(ticket_id, None)
            self._forget(self._path(ticket_id))

    def close(self) -> None:
        """The actor leaves, and its tickets go to others."""
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
        """Keeps what is whole in a file, or removes it."""
        self._sizes[path] = 0
        try:
            data = path.read_bytes()
            payloads = list(whole_records(data))
            size = sum(HEAD.size + len(payload) for payload in payloads)
            if size < len(data):
                with path.open("r+b") as file:
                    file.truncate(size)
            found = open_ticket(payloads)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            self._give_up(path, f"{path.name}: {error}")
            return
        self._sizes[path] = size
        if payloads[-MAX_TAKEN_OVER:] == [TAKEN_OVER] * MAX_TAKEN_OVER:
            log.error("ticket %s is given up: its actor ended again and again without a turn", found.ticket.id)
            self._forget(path)
            return
        self._found[found.ticket.id] = found
        self._append(path, TAKEN_OVER)


def whole_records(data: bytes) -> Iterator[bytes]:
    """The payloads up to the first record that is cut off or damaged."""
    at = 0
    while at + HEAD.size <= len(data):
        length, checksum = HEAD.unpack_from(data, at)
        payload = data[at + HEAD.size : at + HEAD.size + length]
        if len(payload) != length or xxhash.xxh3_64_digest(payload) != checksum:
            return
        yield payload
        at += HEAD.size + length


def open_ticket(payloads: list[bytes]) -> OpenTicket:
    """What a file holds; an answer takes the place of those that an earlier process had from the same turn on.
    ValueError or MsgspecError for what no journal holds."""
    if not payloads:
        raise ValueError("it holds no ticket")
    message = decode(msgspec.msgpack.decode(payloads[0], type=list[bytes]))
    if not isinstance(message, Tickets):
        raise ValueError(f"it begins with {type(message).__name__}")
    answers: dict[int, list[Answer]] = {}
    for payload in payloads[1:]:
        if payload != TAKEN_OVER:
            answer = msgspec.msgpack.decode(payload, type=Answer)
            answers.setdefault(answer.index, [])[answer.turn :] = [answer]
    return OpenTicket(message.tickets[0], answers)
