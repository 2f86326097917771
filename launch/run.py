"""A task with one command: fetches model and data, lays the model out over the GPUs, says what that takes and costs,
and trains. On a laptop, without a GPU, the tasks that end in _tiny run.

    python launch/run.py sokoban_tiny
    python launch/run.py geo3k_multi_turn --model Qwen3-VL-2B-Instruct --gpus 4 [--section.key VALUE ...]
    python launch/run.py mine.toml --gpus 8 --dry-run
    python launch/run.py geo3k_multi_turn --model Qwen3-VL-32B-Thinking --gpus 32 --dry-run --price 2.5
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import os

from launch.task_run.run_request import resolve, run_parser
from launch.task_run.session import run_on_cpu, run_on_gpus
from launch.task_samples import check_env
from shared.config.recipe import fail


def main(argv: list[str] | None = None) -> int:
    """Plan and start a task; return the exit code."""
    options, overrides = run_parser(__doc__).parse_known_args(argv)
    try:
        request = resolve(options, overrides)
        check_env(request.recipe)
        return (run_on_cpu if request.on_cpu else run_on_gpus)(request, options)
    except ValueError as error:
        return fail(error)
    except KeyboardInterrupt:  # includes Stopped
        print("stopped before the run began; an interrupted download goes on with the same command", file=sys.stderr)
        return 130


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
