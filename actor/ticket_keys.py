"""What an episode's requests take from its ticket."""

from __future__ import annotations

from shared.types import PolicyVersion, Ticket


def cache_key(ticket: Ticket, held: tuple[PolicyVersion, str] = (-1, "")) -> str:
    """The same for tickets of one version and learner process: after a restart a number stands for other weights. An
    engine that has sampled with later ones, `held`, has what those made."""
    process = ticket.id.rpartition("-")[2]
    version = max(ticket.version, held[0]) if held[1] in ("", process) else ticket.version
    return f"version {version} of {process}"


def episode_seed(ticket: Ticket, index: int, turn: int) -> int | None:
    """Own to each turn of each episode; None leaves it to the engine when the ticket has none."""
    return (ticket.seed * 1_000_003 + index * 1009 + turn) % 2**31 if ticket.seed else None
