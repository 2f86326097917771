"""What bounds one episode."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """`max_tokens` and `turn_tokens` count sampled tokens, `max_context` all of them with images expanded."""

    max_turns: int = 8
    max_tokens: int = 1536
    turn_tokens: int = 256
    max_context: int = 2048
    env_timeout_s: float = 30.0
    rollout_timeout_s: float = 600.0  # of a rollout function of the user's own
