"""The earlier processes of a run, and which of their tickets and weight versions are still valid."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from learner.tickets.ticket_records import GroupVerdict, newest_version, parse_ticket_id
from shared.engine.engine_messages import parse_weight_name
from shared.types import Group, PolicyVersion

MAX_PROCESSES = 16  # only the newest are remembered


@dataclass(frozen=True, slots=True)
class EarlierProcess:
    """An earlier process of this run, as its last checkpoint describes it: everything after that has been undone."""

    nonce: str
    version: PolicyVersion
    issued: int  # tickets with smaller numbers are valid under this process's ids too


class ProcessHistory:
    """The processes before the one with this `nonce`; empty until `load_state`."""

    def __init__(self, nonce: str) -> None:
        self.nonce = nonce
        self._earlier: dict[str, EarlierProcess] = {}

    def number(self, ticket_id: str) -> int:
        """Return the number of a ticket whose groups are accepted, whichever process of this run gave it the id; -1 for
        any other id."""
        number, nonce = parse_ticket_id(ticket_id)
        earlier = self._earlier.get(nonce)
        return number if nonce == self.nonce or (earlier is not None and number < earlier.issued) else -1

    def is_earlier(self, process: str) -> bool:
        """Tell whether a process is one of the earlier ones."""
        return process in self._earlier

    def refusal(self, ticket_id: str) -> GroupVerdict:
        """Return the verdict on a group of a ticket that is not open."""
        nonce = parse_ticket_id(ticket_id)[1]
        if nonce == self.nonce or self.number(ticket_id) >= 0:
            return GroupVerdict.DUPLICATE
        return GroupVerdict.OUTDATED if nonce in self._earlier else GroupVerdict.UNKNOWN

    def is_undone(self, group: Group, version: PolicyVersion) -> bool:
        """Tell whether any token was sampled with weights that this run's history does not contain, at the learner's
        `version`.

        Engines that name no process are assumed to hold weights of the process that issued the ticket.
        """
        names = [parse_weight_name(name) for t in group.trajectories for name in t.weights]
        last = self._last_of(parse_ticket_id(group.ticket_id)[1], version) if not names else max(v for v, _ in names)
        return newest_version(group) > last or any(v > self._last_of(process, version) for v, process in names)

    def _last_of(self, process: str, version: PolicyVersion) -> PolicyVersion:
        """Return the newest valid version of a process; -1 if it has none. An engine can play with the next version
        before the learner knows that it was loaded, so that one is valid too."""
        if process == self.nonce:
            return version + 1
        return self._earlier[process].version if process in self._earlier else -1

    def state(self) -> list[list[Any]]:
        """Return the earlier processes as JSON values."""
        return [[p.nonce, p.version, p.issued] for p in self._earlier.values()]

    def load_state(self, state: Iterable[Any], last: EarlierProcess, *, forget_tickets: bool = False) -> None:
        """Load a state that the process `last` wrote. With `forget_tickets` no group of an earlier process's ticket is
        accepted."""
        processes = [*(EarlierProcess(*process) for process in state), last][-MAX_PROCESSES:]
        if forget_tickets:
            processes = [replace(process, issued=0) for process in processes]
        self._earlier = {process.nonce: process for process in processes}
