"""Prints the alarms that a run's metrics raise. It needs only the run's folder, during the run or afterwards:

python -m learner.alarms runs/sokoban_tiny

There is one line for each rule that was raised or cleared; the last line counts the rules that are still raised.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from learner.alarms.alarm_replay import replay
from shared.config.recipe import fail
from shared.util.own_commands import called_as


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog=called_as("python -m learner.alarms"),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's folder, with metrics.jsonl and recipe.json")
    try:
        judge, alarms = replay(parser.parse_args(argv).run)
    except (ValueError, OSError) as error:
        return fail(error)
    for alarm in alarms:
        print(alarm.line())
    names = ", ".join(rule.name for rule in judge.raised)
    print(f"{len(judge.raised)} of {len(judge.rules)} alarms are raised at the end{': ' if names else ''}{names}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
