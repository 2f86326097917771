"""The processes that a run has had so far, one after the other, and what of each still counts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from learner.tickets.records import Verdict, newest_version, number_of
from shared.engine_messages import parse_weight_name
from shared.types import Group, PolicyVersion

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

    def is_undone(self, group: Group, version: PolicyVersion) -> bool:
        """Whether a token is of weights that are not part of this history, at the learner's `version`. Engines that
        name no process are believed to hold what the ticket's process published."""
        names = [parse_weight_name(name) for t in group.trajectories for name in t.weights]
        last = self._last_of(number_of(group.ticket_id)[1], version) if not names else max(v for v, _ in names)
        return newest_version(group) > last or any(v > self._last_of(process, version) for v, process in names)

    def _last_of(self, process: str, version: PolicyVersion) -> PolicyVersion:
        """The newest version of a process that counts; -1 if none does. An engine that has the next version plays
        before the learner hears of it."""
        if process == self.nonce:
            return version + 1
        return self._earlier[process].version if process in self._earlier else -1

    def state(self) -> list[list[Any]]:
        """Of the earlier processes, as JSON values."""
        return [[p.nonce, p.version, p.issued] for p in self._earlier.values()]

    def load_state(self, state: Iterable[Any], last: EarlierProcess, *, forget_tickets: bool = False) -> None:
        """`last`: the process that wrote the state. `forget_tickets`: no group of an earlier ticket counts any more."""
        processes = [*(EarlierProcess(*process) for process in state), last][-KNOWN_PROCESSES:]
        if forget_tickets:
            processes = [replace(process, issued=0) for process in processes]
        self._earlier = {process.nonce: process for process in processes}
