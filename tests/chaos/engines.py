"""The engines of the chaos run, started and watched over by launch/actors.py's own supervisor, on a host of their own:
actors and learner know them by their links' addresses."""

from __future__ import annotations

import sys
import time

from launch.engines.engine_supervisor import EngineServer
from launch.engines.host_engines import check_host
from launch.processes.children import Stopped, raise_on_signals, stop_all
from shared.config.recipe import parse, recipe_parser


def main(argv: list[str] | None = None) -> int:
    recipe, _ = parse(recipe_parser(__doc__), argv)
    engines = [EngineServer(spec, recipe.engine) for spec in check_host(recipe)]
    raise_on_signals()
    try:
        for engine in engines:
            engine.start()
        while True:
            for engine in engines:
                engine.keep_alive()
            time.sleep(0.2)
    except Stopped:
        return 130
    finally:
        stop_all([engine.child for engine in engines if engine.child])


if __name__ == "__main__":
    sys.exit(main())
