"""The command `pronk`: runs the program of Pronk's that its first word names, as `python launch/NAME.py` does.

It needs nothing but Python itself, so that --help and --version answer at once.
"""

from __future__ import annotations

import difflib
import sys
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import SourceFileLoader
from types import ModuleType

from pronk.rooms import ROOT, version

EXIT_USER_ERROR = 2


@dataclass(frozen=True, slots=True)
class Command:
    """A word after `pronk`: the program that it runs, with what arguments before the user's, and what that does."""

    program: str
    does: str
    recipe: bool = False  # its first word may be a recipe, for --config RECIPE
    given: tuple[str, ...] = ()


COMMANDS = {
    "train": Command(
        "launch/local.py",
        "a small model learns Sokoban from images here, in a quarter of an hour",
        recipe=True,
        given=("--config", "sokoban_tiny"),
    ),
    "run": Command("launch/run.py", "a task by its name: fetches model and data, plans the GPUs, trains"),
    "local": Command("launch/local.py", "learner, engines and actors of a recipe on this machine", recipe=True),
    "learner": Command("launch/learner.py", "the learner of a recipe alone, of --ranks N processes", recipe=True),
    "actors": Command("launch/actors.py", "engines and actors of a recipe, for a learner elsewhere", recipe=True),
    "agents": Command("launch/agents.py", "episodes of a recipe for agents elsewhere", recipe=True),
    "cluster": Command("launch/cluster.py", "a run on Slurm, Ray, Kubernetes or SkyPilot"),
    "evaluate": Command("launch/evaluate.py", "success of a checkpoint or a model, with its interval", recipe=True),
    "sft": Command("launch/sft.py", "a model learns from demonstrations, and plays before and after", recipe=True),
    "curate": Command("launch/curate.py", "a run's best recorded episodes as demonstrations"),
    "dashboard": Command("launch/dashboard.py", "runs in the browser: curves, episodes, alarms"),
    "curves": Command("launch/curves.py", "draws the curves of runs"),
    "profile": Command("launch/profile_step.py", "torch's profile of a running learner's next step"),
    "doctor": Command("launch/doctor.py", "is this machine ready for a recipe?", recipe=True),
    "plan": Command("learner/plan/__main__.py", "does a recipe's learner fit into the memory of a GPU?", recipe=True),
    "prepare": Command("launch/prepare.py", "makes the data of a shipped task"),
    "check": Command("envs/check.py", "plays an environment and says what breaks the contract"),
    "play": Command("envs/play.py", "you play an environment"),
    "show": Command("envs/show.py", "writes what a model is shown of an environment"),
    "serve": Command("envs/serve.py", "serves an environment over HTTP"),
    "export": Command("learner/export.py", "a checkpoint as a Hugging Face folder"),
    "replay": Command("learner/replay.py", "computes a recorded step again, and compares"),
    "alarms": Command("learner/alarms/__main__.py", "the alarms of a run that has been"),
    "keys": Command("shared/keys.py", "makes the keys of sockets and engines"),
    "fields": Command("shared/config/__main__.py", "every field of a recipe, with its default"),
    "engine-env": Command("launch/engine_env.py", "makes SGLang's own Python environment"),
    "warm-start": Command("launch/warm_start.py", "makes a small model that knows a task's form"),
}


def main() -> None:
    """Run the program that the command line names; exit with its code."""
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help", "help"):
        print(help_text())
        sys.exit(0)
    if words[0] in ("-V", "--version"):
        print(f"pronk {version()}")
        sys.exit(0)
    if words[0] == "--root":
        print(ROOT)
        sys.exit(0)
    if mistake := unknown(words[0]) or versions():
        print(f"error: {mistake}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    run(words[0], words[1:])


def help_text() -> str:
    """Return the table of all commands."""
    width = max(map(len, COMMANDS))
    rows = [f"  {name:{width}}  {command.does}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            f"Pronk {version()}: reinforcement learning of vision-language models on multi-turn tasks.",
            "",
            "usage: pronk COMMAND [OPTION ...]     pronk COMMAND --help     pronk --version     pronk --root",
            "",
            *rows,
            "",
            "In a clone `pronk NAME` is `python launch/NAME.py`. A recipe is a path, or the name of a",
            "shipped one: pronk local colour_tiny. `pronk --root` is the folder of Pronk's own files.",
        ]
    )


def unknown(name: str) -> str:
    """Return, in one line, that there is no such command; "" if there is."""
    if name in COMMANDS:
        return ""
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    return f"pronk {name}: there is no such command; " + (
        f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
    )


def versions() -> str:
    """Return, in one line, that another version than this one is installed too; "" if it is not."""
    others = {
        f"{each.version} in {each.locate_file('')}"
        for each in metadata.distributions(name="pronk")
        if each.version != version()
    }
    if not others:
        return ""
    return (
        f"this is Pronk {version()} in {ROOT}, and Python also finds {', '.join(sorted(others))}: pip uninstall pronk "
        "until none is left, then install one; or take the other one out of PYTHONPATH"
    )


def run(name: str, words: list[str]) -> None:
    """Run a command as Python runs a program: as the module __main__, with Pronk's packages before all others."""
    path = str(ROOT / COMMANDS[name].program)
    sys.argv = [f"pronk {name}", *arguments(COMMANDS[name], words)]
    others = sys.path if sys.flags.safe_path else sys.path[1:]  # without the folder of the file `pronk`
    sys.path[:] = [str(ROOT), *(each for each in others if each != str(ROOT))]
    module = ModuleType("__main__")
    module.__file__ = path
    sys.modules["__main__"] = module
    SourceFileLoader("__main__", path).exec_module(module)


def arguments(command: Command, words: list[str]) -> list[str]:
    """Return the program's arguments: a recipe that stands first as --config, and the command's own arguments before
    the user's, unless the user gives the same option."""
    if command.recipe and words and not words[0].startswith("-"):
        words = ["--config", *words]
    option = command.given[0] if command.given else ""
    own = any(word == option or word.startswith(f"{option}=") for word in words)
    return words if own else [*command.given, *words]
