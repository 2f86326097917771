"""Resolves constraints.txt and constraints-gpu.txt as a stranger's pip does, from the package index alone, on each
Python that they are for: python .ci/resolve.py

It asks for what Pronk depends on and every dependency group of pyproject.toml, and installs nothing. Of pip's
configuration only the way to the index counts: no folders of wheels, no other constraints. One line for each file and
Python; the exit code is 1 if a file does not resolve, or resolves to something that it does not pin."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
FILES = ("constraints.txt", "constraints-gpu.txt")
PYTHONS = ("3.11", "3.12")
UNPINNED = {"constraints.txt": ("nvidia-", "cuda-"), "constraints-gpu.txt": ()}  # the file says why
WAY_TO_THE_INDEX = (
    "index-url",
    "cert",
    "client-cert",
    "proxy",
    "trusted-host",
    "timeout",
    "default-timeout",
    "retries",
)
SECTIONS = ("global", "install", ":env:")  # a later one wins
LIMIT_S = 300
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def main() -> int:
    environ, groups = way_to_the_index(), groups_of(ROOT / "pyproject.toml")
    cases = list(product(FILES, PYTHONS))
    with ThreadPoolExecutor(2) as pool:
        wrong = list(pool.map(lambda case: checked(*case, groups, environ), cases))
    return int(any(wrong))


def checked(file: str, python: str, groups: list[str], environ: dict[str, str]) -> bool:
    """Print the outcome in one line; return whether something is wrong."""
    started = time.monotonic()
    try:
        resolved = resolve(file, python, groups, environ)
        pins = pins_of((ROOT / file).read_text(encoding="utf-8"))
        if loose := unpinned(resolved, pins, UNPINNED[file]):
            raise ValueError(f"does not pin what it resolves to: {', '.join(loose)}")
    except ValueError as error:
        print(f"error: {file} on Python {python}: {error}", file=sys.stderr, flush=True)
        return True
    seconds = time.monotonic() - started
    print(f"{file} on Python {python}: {len(resolved)} distributions after {seconds:.0f} s", flush=True)
    return False


def resolve(file: str, python: str, groups: list[str], environ: dict[str, str]) -> dict[str, str]:
    """Return the version of each distribution that pip would install. Raise ValueError with what conflicts."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        # fast-deps: of an index that serves no metadata pip reads the ends of wheels, gigabytes less than the whole
        command = [
            *PIP,
            "install",
            "--dry-run",
            "--ignore-installed",
            "--report",
            str(report),
            "--use-feature=fast-deps",
        ]
        command += ["--only-binary", ":all:", "--python-version", python, "--constraint", file]
        command += [part for group in groups for part in ("--group", group)]
        command += dependencies_of(ROOT / "pyproject.toml")
        try:
            done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            raise ValueError(f"pip has not resolved it within {LIMIT_S} s") from None
        if done.returncode:
            raise ValueError(conflict(done.stdout, done.stderr))
        found = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {normal(each["metadata"]["name"]): each["metadata"]["version"] for each in found}


def conflict(stdout: str, stderr: str) -> str:
    """Put what pip says that conflicts, else its last error, in one line."""
    lines = listed(stdout, "The conflict is caused by:")
    if missing := listed(stdout, "Additionally, some packages in these conflicts have no matching distributions"):
        lines += [f"the index has none that fits of {', '.join(missing)}"]
    if "connection broken" in stderr:
        lines += ["the index did not answer every time"]
    errors = [line.removeprefix("ERROR: ") for line in stderr.splitlines() if line.startswith("ERROR: ")]
    return "; ".join(dict.fromkeys(lines or errors[-1:] or stderr.splitlines()[-1:])) or "pip failed without a word"


def listed(stdout: str, title: str) -> list[str]:
    """Return the lines below the one that begins with `title`, up to an empty one."""
    _, _, rest = stdout.partition(f"\n{title}")
    return [line.strip() for line in rest.split("\n\n")[0].splitlines()[1:]]


def unpinned(resolved: dict[str, str], pins: dict[str, str], but: tuple[str, ...]) -> list[str]:
    return [f"{name}=={at}" for name, at in sorted(resolved.items()) if name not in pins and not name.startswith(but)]


def pins_of(text: str) -> dict[str, str]:
    """Read the version of each name. Raise ValueError for a line that pins none."""
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    pins = {}
    for line in filter(None, lines):
        name, equals, version = line.partition("==")
        if not equals:
            raise ValueError(f"pins no version: {line}")
        pins[normal(name)] = version
    return pins


def dependencies_of(pyproject: Path) -> list[str]:
    return list(tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]["dependencies"])


def groups_of(pyproject: Path) -> list[str]:
    return list(tomllib.loads(pyproject.read_text(encoding="utf-8"))["dependency-groups"])


def way_to_the_index() -> dict[str, str]:
    """Make the environment of a pip that keeps of its configuration only how to reach the index."""
    said = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=True).stdout
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    kept = {f"PIP_{key.upper().replace('-', '_')}": value for key, value in settings(said).items()}
    return environ | kept | {"PIP_CONFIG_FILE": os.devnull}


def settings(said: str) -> dict[str, str]:
    """Pick from what `pip config list` says the settings that lead to the index."""
    found: dict[str, str] = {}
    rows = [line.partition("=") for line in said.splitlines()]
    for section in SECTIONS:
        for name, _, value in rows:
            where, _, key = name.rpartition(".")
            if where == section and key in WAY_TO_THE_INDEX:
                found[key] = " ".join(str(ast.literal_eval(value)).split())
    return found


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main())
