"""Pages that are made from the code when the site is built: recipe fields, settings of environments, metrics, commands,
wire format, engine API, files, and the pages that live beside what they describe."""

from __future__ import annotations

import ast
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
sys.path.insert(0, str(ROOT))
PACKAGES = ("shared", "envs", "actor", "learner", "kernels", "launch")
BESIDE_THE_CODE = {  # page: the file that it shows
    "explanation/security.md": "shared/SECURITY.md",
    "explanation/faults.md": "tests/FAULTS.md",
    "explanation/chaos.md": "tests/CHAOS.md",
    "explanation/hostile.md": "tests/HOSTILE.md",
    "figures/staleness.md": "tests/bench/STALENESS.md",
    "figures/learner.md": "tests/bench/LEARNER.md",
    "figures/kernels.md": "tests/bench/KERNELS.md",
    "figures/publication.md": "tests/bench/PUBLISH.md",
    "figures/transport.md": "tests/bench/TRANSPORT.md",
}
COMMANDS = (
    "launch/run.py", "launch/learner.py", "launch/actors.py", "launch/local.py", "launch/prepare.py",
    "launch/warm_start.py", "launch/curves.py", "launch/dashboard.py", "launch/doctor.py", "launch/evaluate.py",
    "learner.plan", "learner.export", "learner.replay", "learner.alarms", "shared.config", "shared.keys",
    "envs.check", "envs.play", "envs.show", "actor.engine.server",
)  # fmt: skip
ENVIRONMENTS = ("envs.sokoban", "envs.geo3k", "envs.geo3k_multi_turn", "envs.colour")
HELP_S = 120.0


def on_files(files: Files, config: Any) -> Files:
    """Adds the generated pages and the images of the pages beside the code."""
    pages: dict[str, Callable[[], str]] = {
        "reference/recipe.md": recipe_page,
        "reference/environments.md": environments_page,
        "reference/metrics.md": metrics_page,
        "reference/alarms.md": alarms_page,
        "reference/commands.md": commands_page,
        "reference/wire-format.md": wire_page,
        "reference/engine-api.md": engine_page,
        "reference/files.md": files_page,
    }
    for uri, page in pages.items():
        files.append(File.generated(config, uri, content=page()))
    for uri, path in BESIDE_THE_CODE.items():
        files.append(File.generated(config, uri, content=_with_links(ROOT / path)))
    for image in sorted((ROOT / "tests" / "bench").glob("*.png")):
        files.append(File.generated(config, f"figures/{image.name}", abs_src_path=str(image)))
    return files


def _with_links(path: Path) -> str:
    """The page's text; links to other such pages follow them, links to files of the code become plain text."""
    uri_of = {str((ROOT / source).resolve()): uri for uri, source in BESIDE_THE_CODE.items()}
    own = next(uri for uri, source in BESIDE_THE_CODE.items() if ROOT / source == path)

    def link(found: re.Match[str]) -> str:
        text, target = found[1], found[2]
        if "://" in target or target.startswith("#") or target.endswith(".png"):
            return found[0]
        uri = uri_of.get(str((path.parent / target.split("#")[0]).resolve()))
        return f"[{text}]({os.path.relpath(uri, Path(own).parent)})" if uri else text

    return re.sub(r"\[([^\]]*)\]\(([^)]+)\)", link, path.read_text(encoding="utf-8"))


def recipe_page() -> str:
    from shared.config import field_table

    return (
        "# Recipe fields\n\nA recipe is a TOML file with a section for each process. Any field can be set on the "
        "command line (`--learner.optimizer.lr 2e-6`) or by the environment (`PRONK_LEARNER__OPTIMIZER__LR=2e-6`); "
        "the command line wins over the environment, the environment over the file. "
        "`python -m shared.config` prints this table.\n\n" + field_table() + "\n"
    )


def environments_page() -> str:
    from envs.loader import load_module
    from shared.config import table_of

    parts = [
        "# Settings of the environments\n\nWhat `env.args`, `data.variants` and a sample's `env_config` may set, the "
        "latter going before. `system_prompt` is a setting of all of them.\n"
    ]
    for name in ENVIRONMENTS:
        module = load_module(name)
        fields = module.SETTINGS.model_fields
        said = table_of(fields) if fields else "It has none."
        parts.append(f"\n## {name}\n\n{_docstring(name).splitlines()[0]}\n\n{said}\n")
    return "".join(parts)


def metrics_page() -> str:
    sections = tomllib.loads((ROOT / "learner/metrics/catalogue.toml").read_text(encoding="utf-8"))
    parts = [
        "# Metrics\n\nWhat TensorBoard and `metrics.jsonl` show. Names in braces stand for one word: a lag, a reason, "
        "an ending, or a metric of the environment.\n"
    ]
    for section, metrics in sections.items():
        parts.append(f"\n## {section.replace('_', ' ').capitalize()}\n\n| metric | meaning | healthy | what to do |\n")
        parts.append("|---|---|---|---|\n")
        parts += [f"| `{name}` | {m['meaning']} | {m['healthy']} | {m['cure']} |\n" for name, m in metrics.items()]
    return "".join(parts)


def alarms_page() -> str:
    from learner.alarms.rules import LIMITS
    from learner.alarms.series import NUMBERS

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
    parts = ["# Commands\n\nEach command's own help. Commands with `--config` also take every field of a recipe.\n"]
    for command in COMMANDS:
        line = [command] if command.endswith(".py") else ["-m", command]
        said = _docstring(command) if command == "shared.config" else f"```\n{_help(line)}\n```"
        parts.append(f"\n## python {' '.join(line)}\n\n{said}\n")
    return "".join(parts)


def _help(line: list[str]) -> str:
    done = subprocess.run(
        [sys.executable, *line, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=HELP_S,
        env={**os.environ, "COLUMNS": "90"},
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{' '.join(line)} --help ended with {done.returncode}: {done.stderr[-300:]}")
    return done.stdout.strip()


def wire_page() -> str:
    rows = ["| message | fields | meaning |\n|---|---|---|\n"]
    for node in ast.parse((ROOT / "shared/types.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name not in ("Ending",):
            fields = [
                f"`{f.target.id}`" for f in node.body if isinstance(f, ast.AnnAssign) and isinstance(f.target, ast.Name)
            ]
            rows.append(f"| `{node.name}` | {', '.join(fields)} | {_first_line(ast.get_docstring(node))} |\n")
    return f"# Wire format\n\n{_text(_docstring('shared.codec'))}\n\n## Records\n\n{''.join(rows)}"


def engine_page() -> str:
    return (
        "# Engine API\n\nActors and the learner's publisher speak the part of SGLang's HTTP API that "
        "`shared/engine_api.py` holds; SGLang's server and the embedded engine answer it.\n\n"
        + _text(_docstring("shared.engine_api"))
        + "\n\n## Images\n\n"
        + _text(_docstring("shared.engines.images"))
        + "\n\n## The embedded engine's routes\n\n"
        + _text(_docstring("actor.engine.app"))
        + "\n"
    )


def files_page() -> str:
    parts = ["# Every file in one line\n"]
    for package in PACKAGES:
        parts.append(f"\n## {package}/\n\n")
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.name != "__init__.py" and "stand_ins" not in path.parts:
                said = _first_line(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))))
                parts.append(f"- `{path.relative_to(ROOT)}`: {said}\n")
    return "".join(parts)


def _docstring(command: str) -> str:
    path = ROOT / (command if command.endswith(".py") else command.replace(".", "/") + ".py")
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def _text(docstring: str) -> str:
    """Indented blocks of a docstring as code blocks."""
    return re.sub(
        r"((?:^    .*\n?|^\n(?=    ))+)", lambda block: f"\n```\n{block[0].rstrip()}\n```\n", docstring, flags=re.M
    )


def _first_line(docstring: str | None) -> str:
    """The first sentence, on one line."""
    first = (docstring or "").split("\n\n")[0].replace("\n", " ").strip()
    return first.removesuffix(".").replace("|", "\\|")
