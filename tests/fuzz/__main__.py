"""Mutated messages against the wire's decoder: each is refused with its reason or is a valid message.

    python -m tests.fuzz --messages 1000000 --seed 0

The last line is one JSON object; the exit code is 1 if a message raised anything but a `WireError`, took seconds, or
made memory grow.
"""

from __future__ import annotations

import argparse
import json
import sys

from tests.fuzz.mutations import run

SLOW_S = 5.0
GROWTH_BYTES = 32 * 2**20


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="mutated messages against the decoder")
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    result = run(arguments.messages, arguments.seed)
    print(json.dumps(result))
    return int(result["slowest_s"] > SLOW_S or result["growth_bytes"] > GROWTH_BYTES)  # type: ignore[operator]


if __name__ == "__main__":
    sys.exit(main())
