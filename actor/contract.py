"""An episode that breaks the contract with the learner: a failed one takes its place, and that of no other."""

from __future__ import annotations

from msgspec.structs import replace

from actor.stream import Stream
from shared.codec import Limits, TokenRules, WireError, check_trajectory, encode
from shared.types import Ending, Group, Trajectory


def failed(error: object) -> Trajectory:
    words = str(error).encode(errors="replace").decode()
    return Stream().trajectory((), Ending.WIRE_ERROR, error=f"wire: {words}")


def broken(trajectory: Trajectory, rules: TokenRules) -> str:
    """What is wrong with a trajectory, which may be a rollout function's own; empty if nothing is."""
    try:
        check_trajectory(trajectory, rules)
    except WireError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - of fields that are of no type that they should be
        return f"{type(error).__name__}: {error}"
    return ""


def sendable(group: Group, error: WireError, max_bytes: int) -> Group:
    """A group that cannot be sent in a message of `max_bytes`, for `error`, with failed episodes in place of those that
    cannot be sent by themselves, or of all where each can."""
    limits = Limits(message_bytes=max_bytes)
    wrong = [_unsendable(replace(group, trajectories=(t,)), limits) for t in group.trajectories]
    wrong = wrong if any(wrong) else [str(error)] * len(wrong)
    kept = (failed(why) if why else t for t, why in zip(group.trajectories, wrong, strict=True))
    return replace(group, trajectories=tuple(kept))


def _unsendable(group: Group, limits: Limits) -> str:
    try:
        encode(group, limits)
    except WireError as error:
        return str(error)
    return ""
