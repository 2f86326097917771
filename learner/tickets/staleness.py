"""Staleness as two pure formulas: when a ticket may be issued, and what may be trained first."""

from __future__ import annotations

from collections.abc import Mapping

from shared.types import PolicyVersion


def may_issue(issued: int, dropped: int, version: PolicyVersion, max_staleness: int, groups_per_version: int) -> bool:
    """Whether one more training ticket may be issued.

    With groups consumed oldest first, the group of the n-th ticket that is not dropped is trained on at version
    n // groups_per_version; the bound keeps that at most `max_staleness` versions after the ticket's issue.
    """
    return issued - dropped < (version + 1 + max_staleness) * groups_per_version


def leaves_room(
    open_by_version: Mapping[PolicyVersion, int],
    trained: int,
    version: PolicyVersion,
    max_staleness: int,
    groups_per_version: int,
) -> bool:
    """Whether all open tickets (counted by the version that issued them) can still be trained in time.

    A ticket issued at version v is trained at version v + max_staleness at the latest. So up to the end of each
    version there must be room for all that is due by then; whoever takes newer groups first takes it away.
    """
    due = 0
    for issued_at in sorted(open_by_version):
        due += open_by_version[issued_at]
        last = max(issued_at + max_staleness, version)
        if due > max(0, (last + 1) * groups_per_version - trained):
            return False
    return True
