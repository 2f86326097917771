"""Episodes that ranks sharing a microbatch must cut in awkward places."""

from __future__ import annotations

from typing import Any

from shared.types import Group
from shared.vision import VisionSpec
from tests.support.episodes import random_groups

# By case: (number of episodes, how each is drawn). All episodes of a case are in one microbatch.
CUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one document across every cut": (1, {"turns": 3, "turn_tokens": (20, 30)}),
    "many short documents": (12, {"turns": 1, "prompt_tokens": 2, "turn_tokens": (1, 4), "with_images": False}),
    "a rank without pictures": (1, {"turns": 1, "prompt_tokens": 2, "turn_tokens": (90, 91), "sides": (64,)}),
    "a rank without predictors": (1, {"turns": 1, "prompt_tokens": 90, "turn_tokens": (3, 4), "with_images": False}),
    "one picture on two ranks": (1, {"turns": 1, "prompt_tokens": 2, "turn_tokens": (2, 3), "sides": (160,)}),
    "more chunks than tokens": (1, {"turns": 1, "prompt_tokens": 1, "turn_tokens": (1, 2), "with_images": False}),
}


def groups_of(case: str, spec: VisionSpec) -> list[Group]:
    count, drawn = CUTS[case]
    return random_groups(spec, count, seed=50, **drawn)
