"""Starts engines and actors whose episodes agents elsewhere play: programs in containers or on other machines.

python launch/agents.py --config launch/recipes/R.toml --actor.learner tcp://HOST:PORT
python launch/agents.py --config R.toml --actor.learner tcp://HOST:PORT --rollout.listen 0.0.0.0:8600 \\
  --rollout.api_key_file keys/engine.key --engine.count 0
python launch/agents.py --config launch/recipes/R.toml --record DIR     # no learner: groups go into a folder

An agent leases an episode with POST /lease at rollout.listen (127.0.0.1:8600, unless told otherwise), plays it through
its base URL, and posts the reward: docs/how-to/agents.md.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if __name__ == "__main__":  # a Ctrl-C amid these imports waits: as an exception there it leaves a traceback or is lost
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))

import logging
import os

from launch.actors import run_to_its_end
from launch.processes.children import run_program
from shared.config.recipe import parse, recipe_parser

LISTEN = "127.0.0.1:8600"


def main(argv: list[str] | None = None) -> int:
    parser = recipe_parser(__doc__)
    parser.add_argument("--record", default="", metavar="DIR", help="no learner: groups go into this folder")
    words = sys.argv[1:] if argv is None else argv
    recipe, options = parse(parser, words)
    if not recipe.rollout.listen:
        others = [word for name in ("agent", "command", "path") for word in (f"--rollout.{name}", "")]
        recipe, options = parse(parser, [*words, "--rollout.listen", LISTEN, *others])
    return run_to_its_end(recipe, options.record)


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.captureWarnings(True)
    run_program(main)
