"""Staleness as two pure formulas: when a ticket may be issued, and how old its group is."""

from __future__ import annotations

from shared.types import PolicyVersion


def may_issue(issued: int, dropped: int, version: PolicyVersion, max_staleness: int, groups_per_version: int) -> bool:
    """Whether one more training ticket may be issued.

    With groups consumed oldest first, the group of the n-th ticket that is not dropped is trained on at version
    n // groups_per_version; the bound keeps that at most `max_staleness` versions after the ticket's issue.
    """
    return issued - dropped < (version + 1 + max_staleness) * groups_per_version


def age(version_now: PolicyVersion, ticket_version: PolicyVersion) -> int:
    """Publications between a ticket's issue (or a token's sampling) and now."""
    return version_now - ticket_version
