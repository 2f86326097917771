"""One actor of another host of the chaos run, as launch/actors.py supervises it:

    python -m tests.chaos.host INDEX --config R.toml [--section.key VALUE ...]

With CHAOS_SICK in its environment each of its episodes fails at once; with CHAOS_SLOW each step takes long.
"""

from __future__ import annotations

import sys
import time

from launch.processes.actor_supervisor import ActorFailed, ActorProcess
from launch.processes.children import Stopped, raise_on_signals, stop_all
from shared.config.recipe import parse, recipe_parser


def main(argv: list[str]) -> int:
    recipe, _ = parse(recipe_parser(__doc__), argv[1:])
    actor = ActorProcess(recipe, int(argv[0]), tuple(recipe.engine.urls))
    raise_on_signals()
    try:
        actor.start()
        while not actor.done:
            actor.keep_alive()
            time.sleep(0.1)
    except ActorFailed as failure:
        return failure.code
    except Stopped:
        return 130
    finally:
        stop_all([actor.child] if actor.child else [])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
