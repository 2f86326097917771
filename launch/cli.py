"""What the launch scripts share: `--config R.toml`, overrides, and one line for a user's mistake."""

from __future__ import annotations

import argparse
import sys

from shared.config import ConfigError, Recipe, load_recipe

EXIT_USER_ERROR = 2


def parse(description: str | None, argv: list[str]) -> Recipe:
    """The recipe with its overrides. Exits with one line on a mistake."""
    return load(*split(description, argv))


def split(description: str | None, argv: list[str]) -> tuple[str, list[str]]:
    """The recipe's path, and the overrides as they were written."""
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Any field of the recipe can be overridden: --learner.optimizer.lr 2e-6 --env.max_turns 4",
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, metavar="R.toml", help="recipe; see launch/recipes/")
    options, overrides = parser.parse_known_args(argv)
    return options.config, overrides


def take_option(arguments: list[str], name: str, default: str) -> tuple[str, list[str]]:
    """The value of an option of a script's own, and the arguments without it."""
    if name not in arguments[:-1]:
        return default, arguments
    at = arguments.index(name)
    return arguments[at + 1], arguments[:at] + arguments[at + 2 :]


def load(path: str, overrides: list[str]) -> Recipe:
    try:
        return load_recipe(path, overrides)
    except ConfigError as error:
        sys.exit(fail(error))


def fail(error: Exception) -> int:
    """Prints a user's mistake in one line; returns the exit code."""
    print("error: " + " ".join(str(error).split()), file=sys.stderr, flush=True)
    return EXIT_USER_ERROR
