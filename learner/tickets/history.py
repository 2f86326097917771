"""The processes that a run has had so far, one after the other, and what of each still counts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from learner.tickets.records import Verdict, number_of
from shared.types import PolicyVersion

KNOWN_PROCESSES = 16


@dataclass(frozen=True, slots=True)
class EarlierProcess:
    """An earlier process of this run, as of the checkpoint that ended it: what came later has been undone."""

    nonce: str
    version: PolicyVersion
    issued: int  # tickets with smaller numbers count under its ids too


class History:
    """Of the process with this `nonce`; empty until `load_state`."""

    def __init__(self, nonce: str) -> None:
        self.nonce = nonce
        self._earlier: dict[str, EarlierProcess] = {}

    def number(self, ticket_id: str) -> int:
        """Of a ticket whose groups count, whichever process of this run gave it the id; -1 for any other."""
        number, nonce = number_of(ticket_id)
        earlier = self._earlier.get(nonce)
        return number if nonce == self.nonce or (earlier is not None and number < earlier.issued) else -1

    def refusal(self, ticket_id: str) -> Verdict:
        """What is said to a group of a ticket that is not open."""
        nonce = number_of(ticket_id)[1]
        if nonce == self.nonce or self.number(ticket_id) >= 0:
            return Verdict.DUPLICATE
        return Verdict.OUTDATED if nonce in self._earlier else Verdict.UNKNOWN

    def newest_version(self, ticket_id: str, version: PolicyVersion) -> PolicyVersion:
        """The newest version that tokens of this ticket may be of, `version` being the learner's: an engine that has
        the next one plays before the learner hears of it."""
        earlier = self._earlier.get(number_of(ticket_id)[1])
        return version + 1 if earlier is None else earlier.version

    def state(self) -> list[list[Any]]:
        """Of the earlier processes, as JSON values."""
        return [[p.nonce, p.version, p.issued] for p in self._earlier.values()]

    def load_state(self, state: Iterable[Any], last: EarlierProcess, *, forget_tickets: bool = False) -> None:
        """`last`: the process that wrote the state. `forget_tickets`: no group of an earlier ticket counts any more."""
        processes = [*(EarlierProcess(*process) for process in state), last][-KNOWN_PROCESSES:]
        if forget_tickets:
            processes = [replace(process, issued=0) for process in processes]
        self._earlier = {process.nonce: process for process in processes}
