"""A turn of a game whose model writes what it sees, thinks and foresees."""

from __future__ import annotations

from collections.abc import Callable

from envs.base import Info, Observation
from envs.reasoning.board_facts import BoardFacts
from envs.reasoning.forms import parts_of
from envs.reasoning.word_rewards import ReasoningSettings, judged

Result = tuple[Observation, bool, Info]


def reasoned_step(
    response: str, step: Callable[[str], Result], facts: Callable[[], BoardFacts], settings: ReasoningSettings
) -> tuple[Result, float]:
    """Play a turn by a game's own `step`; return its result with the reward and metrics of what was written, and that
    reward. An answer that lacks the form is given to `step` as "", unless the form is that of the moves alone."""
    if not settings.judges_words:
        return step(response), 0.0
    parts, before = parts_of(response, settings.reasoning), facts()
    observation, done, info = step(response if parts is not None or settings.reasoning == "none" else "")
    written = judged(parts, len(info["parsed_actions"]), before, facts(), settings.state_language)
    gained = written.reward(settings)
    info["raw_action"] = response
    info["reward"] += gained
    info["metrics"]["turn_metrics"] |= written.metrics(settings)
    return (observation, done, info), gained
