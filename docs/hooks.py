"""Pages that are made from the code when the site is built: recipe fields, settings of environments, metrics, commands,
wire format, engine API and files."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "launch" / "package"
sys.path[:0] = [str(ROOT), str(PACKAGE)]
PACKAGES = ("shared", "envs", "actor", "learner", "kernels", "launch")
ENVIRONMENTS = (
    "envs.sokoban", "envs.frozen_lake", "envs.maze", "envs.sliding_puzzle", "envs.scene", "envs.scene_zoom",
    "envs.geo3k", "envs.geo3k_multi_turn", "envs.colour", "envs.gymnasium", "envs.vagen", "envs.verifiers",
    "envs.remote",
)  # fmt: skip
WITH_METHODS = ("Env", "RunFiles")  # of the page of Python
NO_SIGNATURE = ("Recipe", "Sample", "Played")
HELP_S = 120.0


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    pages: dict[str, Callable[[], str]] = {
        "reference/recipe.md": recipe_page,
        "reference/all-recipe-fields.md": all_fields_page,
        "reference/environments.md": environments_page,
        "reference/metrics.md": metrics_page,
        "reference/alarms.md": alarms_page,
        "reference/commands.md": commands_page,
        "reference/python.md": python_page,
        "reference/wire-format.md": wire_page,
        "reference/engine-api.md": engine_page,
        "reference/files.md": files_page,
    }
    for uri, page in pages.items():
        files.append(File.generated(config, uri, content=page()))
    return files


def recipe_page() -> str:
    """Return the page of the fields that most recipes set."""
    from shared.config.recipe import MAIN_FIELDS, known_fields, table_of

    fields = known_fields()
    return (
        "# Recipe fields\n\nA recipe is a TOML file with a section for each process. Any field can be set on the "
        "command line (`--learner.optimizer.lr 2e-6`) or by the environment (`PRONK_LEARNER__OPTIMIZER__LR=2e-6`); "
        "the command line wins over the environment, the environment over the file. These are the fields that matter "
        f"to most runs; the other {len(fields) - len(MAIN_FIELDS)} have defaults that rarely need a change, and stand "
        "on [a page of their own](all-recipe-fields.md).\n\n"
        + table_of({key: fields[key] for key in MAIN_FIELDS})
        + "\n"
    )


def all_fields_page() -> str:
    """Return the page of all fields."""
    from shared.config.recipe import field_table

    return (
        "# All recipe fields\n\nEvery field, section by section; `python -m shared.config` prints this table. "
        "[The ones that matter to most runs](recipe.md).\n\n" + field_table() + "\n"
    )


def environments_page() -> str:
    """Return the page of the shipped environments' settings."""
    from envs.loader import load_module
    from shared.config.recipe import table_of

    parts = [
        "# Settings of the environments\n\nWhat `env.args`, `data.variants` and a sample's `env_config` may set, the "
        "latter going before. `system_prompt` is a setting of all of them.\n"
    ]
    for name in ENVIRONMENTS:
        module = load_module(name)
        fields = module.SETTINGS.model_fields
        table = table_of(fields) if fields else "It has none."
        parts.append(f"\n## {name}\n\n{_docstring(name).splitlines()[0]}\n\n{table}\n")
    return "".join(parts)


def metrics_page() -> str:
    """Return the page of all metrics."""
    sections = tomllib.loads((ROOT / "learner/metrics/catalogue.toml").read_text(encoding="utf-8"))
    parts = [
        "# Metrics\n\nWhat TensorBoard and `metrics.jsonl` show. Names in braces stand for one word: a lag, a reason, "
        "an ending, a metric of the environment, or a task, held-out set or pool of the recipe.\n"
    ]
    for section, metrics in sections.items():
        parts.append(f"\n## {section.replace('_', ' ').capitalize()}\n\n| metric | meaning | healthy | what to do |\n")
        parts.append("|---|---|---|---|\n")
        parts += [f"| `{name}` | {m['meaning']} | {m['healthy']} | {m['cure']} |\n" for name, m in metrics.items()]
    return "".join(parts)


def alarms_page() -> str:
    """Return the page of all alarm rules."""
    from learner.alarms.metric_history import NUMBERS
    from learner.alarms.rules import LIMITS

    sections = tomllib.loads((ROOT / "learner/alarms/rules.toml").read_text(encoding="utf-8"))
    parts = [
        "# Alarms\n\nThe rules of the [alarms](../how-to/alarms.md): one is raised when any of its conditions has held "
        "for so many steps in a row, and over when none has for as many.\n\n"
        "| alarm | level | condition | steps | what it says | cause | look at | do |\n"
        "|---|---|---|---|---|---|---|---|\n"
    ]
    for name, r in sections.items():
        when = " or ".join(f"`{condition}`" for condition in r["when"])
        says = " | ".join((r["message"], r["cause"], r["look_at"], r["cure"]))
        parts.append(f"| `{name}` | {r['level']} | {when} | {r['holds']} | {says} |\n")
    parts.append("\n## Words in the conditions\n\n")
    parts += [f"- `{name}`: {_first_line(number.__doc__)}\n" for name, number in NUMBERS.items()]
    parts += [f"- `{name}`: {words}\n" for name, words in LIMITS.items()]
    return "".join(parts)


def commands_page() -> str:
    """Return the page of all commands, with their help."""
    from pronk.command import COMMANDS

    parts = [
        "# Commands\n\nEach command's own help. `pronk NAME` runs the program below it, of a clone or of an "
        "[installed](../how-to/install.md) Pronk. Commands with `--config` also take every field of a recipe.\n"
    ]
    for name, command in COMMANDS.items():
        program = command.program
        shown = _docstring(program) if name == "fields" else f"```\n{_help(['-m', 'pronk', name])}\n```"
        parts.append(f"\n## pronk {name}\n\n`{program}`: {command.does}.\n\n{shown}\n")
    engine = "actor.engine.server"
    parts.append(f"\n## python -m {engine}\n\n```\n{_help(['-m', engine])}\n```\n")
    return "".join(parts)


def _help(line: list[str]) -> str:
    """Return what a command prints for --help. SystemExit if it fails."""
    done = subprocess.run(
        [sys.executable, *line, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=HELP_S,
        env={**os.environ, "COLUMNS": "90", "PYTHONPATH": str(PACKAGE)},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{' '.join(line)} --help ended with {done.returncode}: {done.stderr[-300:]}")
    return done.stdout.strip()


def python_page() -> str:
    """Return the page of what `import pronk` gives, from its docstrings."""
    import pronk

    parts = [f"# Python\n\n{_text(inspect.getdoc(pronk) or '')}\n\n[A script](../how-to/python.md) uses all of it.\n"]
    for name in pronk.__all__:
        value = getattr(pronk, name)
        if not callable(value):
            continue
        signature = _signature(value) if name not in NO_SIGNATURE else ""
        parts.append(f"\n## pronk.{name}\n\n```python\n{name}{signature}\n```\n\n{_sections(inspect.getdoc(value))}\n")
        for method, function in vars(value).items() if inspect.isclass(value) and name in WITH_METHODS else ():
            if method.startswith("_"):
                continue
            own = function.fget if isinstance(function, property) else function
            words = "" if isinstance(function, property) else _signature(own)
            parts.append(f"\n### {name}.{method}{words}\n\n{_sections(inspect.getdoc(own))}\n")
    return "".join(parts)


def _signature(function: Any) -> str:
    """Return a signature without the quotes around its types."""
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(inspect.signature(function)))


def _sections(docstring: str | None) -> str:
    """Return a docstring whose sections Args and Raises are tables."""
    text, *sections = re.split(r"^(Args|Raises):\n", docstring or "", flags=re.M)
    parts = [_text(text.strip())]
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        rows = re.sub(r"\n {5,}", " ", body.rstrip()).splitlines()
        named = [row.strip().partition(": ") for row in rows if row.strip()]
        parts.append(f"| {title.lower()} | |\n|---|---|\n" + "\n".join(f"| `{a}` | {_row(b)} |" for a, _, b in named))
    return "\n\n".join(parts)


def _row(text: str) -> str:
    return text.replace("|", "\\|")


def wire_page() -> str:
    """Return the page of the wire format and its records."""
    rows = ["| message | fields | meaning |\n|---|---|---|\n"]
    for node in ast.parse((ROOT / "shared/types.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name not in ("Ending",):
            fields = [
                f"`{f.target.id}`" for f in node.body if isinstance(f, ast.AnnAssign) and isinstance(f.target, ast.Name)
            ]
            rows.append(f"| `{node.name}` | {', '.join(fields)} | {_first_line(ast.get_docstring(node))} |\n")
    return f"# Wire format\n\n{_text(_docstring('shared.wire.codec'))}\n\n## Records\n\n{''.join(rows)}"


def engine_page() -> str:
    """Return the page of the engines' API."""
    return (
        "# Engine API\n\nActors and the learner's publisher speak the part of SGLang's HTTP API that "
        "`shared/engine/engine_api.py` holds; SGLang's server and the embedded engine answer it.\n\n"
        + _text(_docstring("shared.engine.engine_api"))
        + "\n\n## Images\n\n"
        + _text(_docstring("shared.engine.sent_images"))
        + "\n\n## The embedded engine's routes\n\n"
        + _text(_docstring("actor.engine.app"))
        + "\n"
    )


def files_page() -> str:
    """Return the page that names every file."""
    parts = ["# Every file in one line\n"]
    for package in PACKAGES:
        parts.append(f"\n## {package}/\n\n")
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.name != "__init__.py" and "stand_ins" not in path.parts:
                purpose = _first_line(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))))
                parts.append(f"- `{path.relative_to(ROOT)}`: {purpose}\n")
    return "".join(parts)


def _docstring(command: str) -> str:
    """Return the docstring of a file or of a module by its dotted name."""
    path = ROOT / (command if command.endswith(".py") else command.replace(".", "/") + ".py")
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def _text(docstring: str) -> str:
    """Return a docstring with its indented blocks as code blocks."""
    return re.sub(
        r"((?:^    .*\n?|^\n(?=    ))+)", lambda block: f"\n```\n{block[0].rstrip()}\n```\n", docstring, flags=re.M
    )


def _first_line(docstring: str | None) -> str:
    """Return the first paragraph, on one line."""
    first = (docstring or "").split("\n\n")[0].replace("\n", " ").strip()
    return first.removesuffix(".").replace("|", "\\|")
