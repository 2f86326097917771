"""A task with one command: fetches model and data, lays the model out over the GPUs, says what that takes and costs,
and trains. On a laptop, without a GPU, the tasks that end in _tiny run.

    python launch/run.py sokoban_tiny
    python launch/run.py geo3k_multi_turn --model Qwen3-VL-2B-Instruct --gpus 4 [--section.key VALUE ...]
    python launch/run.py geo3k_multi_turn --model Qwen3-VL-32B-Thinking --gpus 32 --dry-run --price 2.5
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import os

from launch.task_run.request import parser, request
from launch.task_run.session import on_cpu, on_gpus
from launch.task_samples import check_env
from shared.config import fail


def main(argv: list[str] | None = None) -> int:
    options, overrides = parser(__doc__).parse_known_args(argv)
    try:
        asked = request(options, overrides)
        check_env(asked.recipe)
        return (on_cpu if asked.on_cpu else on_gpus)(asked, options)
    except ValueError as error:
        return fail(error)
    except KeyboardInterrupt:  # Stopped is one
        print("stopped: the same command goes on where a download has ended", file=sys.stderr)
        return 130


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
