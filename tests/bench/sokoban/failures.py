"""Why recorded Sokoban episodes fail: each is played again with its answers, beside the solver.

    python -m tests.bench.sokoban.failures RUN [--from-step N]

A failed episode is of one class. It is `lost` where a push left no solution, by what was wrong of that turn: what
<think> told of the board (`misread`), else what <answer> told of its moves (`misforeseen`), else the choice alone
(`chosen`). One that could still be won is `circling` where it came to a position twice, else `slow`. `by_length` counts
failed and all episodes by the length of the shortest solution. The last line is one JSON object; episodes are named as
in the dashboard's addresses.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from envs.board_env import length_classes
from envs.boards.solver import optimal_first_moves, solve
from envs.sokoban import build_env
from shared.recordings.episode_format import RecordedEpisode
from shared.recordings.reader import episodes, steps
from shared.types import Sample

NAMED = 4  # episodes of each class


def why(episode: RecordedEpisode, args: dict[str, Any]) -> tuple[str, str]:
    """The class of its shortest solution, and why it failed; "" if it was solved."""
    env = build_env(Sample(episode.sample_id, metadata=json.loads(episode.metadata)), args | {"diagnostics": True})
    length = length_classes(len(optimal_first_moves(env.position)))[0]
    been, circled = {env.position}, False
    for turn in episode.turns:
        _, _, info = env.step(turn.answer)
        if env.success:
            return length, ""
        if solve(env.position) is None:
            told = info["metrics"]["turn_metrics"]
            wrong = "misread" if not told["read_accuracy"] else "" if told["foresight_accuracy"] else "misforeseen"
            return length, f"lost: {wrong or 'chosen'}"
        circled |= env.position in been
        been.add(env.position)
    return length, "circling" if circled else "slow"


def measure(run: Path, first: int) -> dict[str, Any]:
    args = json.loads((run / "recipe.json").read_text())["env"]["args"]
    failed, played, reasons = Counter[str](), Counter[str](), Counter[str]()
    named: dict[str, list[str]] = defaultdict(list)
    for path in steps(run / "recordings"):
        for episode in episodes(path):
            if int(path.stem.removeprefix("step_")) < first:
                continue
            length, reason = why(episode, args)
            played[length] += 1
            if reason:
                failed[length] += 1
                reasons[reason] += 1
                named[reason].append(f"{path.stem}/{episode.id}")
    return {
        "episodes": played.total(),
        "failed": failed.total(),
        "by_length": {length: [failed[length], played[length]] for length in sorted(played)},
        "reasons": dict(reasons.most_common()),
        "named": {reason: ids[-NAMED:] for reason, ids in named.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run's folder")
    parser.add_argument("--from-step", type=int, default=0)
    options = parser.parse_args()
    found = measure(options.run, options.from_step)
    for reason, count in found["reasons"].items():
        print(f"{reason:20} {count:5}   {' '.join(found['named'][reason])}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
