"""Who may import whom, and which modules stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OURS = {"actor", "learner", "envs", "shared", "kernels", "launch"}
ALLOWED = {
    "shared": {"shared"},
    "envs": {"envs", "shared"},
    "actor": {"actor", "shared", "envs"},
    "learner": {"learner", "shared", "kernels"},
    "kernels": {"kernels"},
    "launch": OURS,
}
SHARED_THIRD_PARTY = {"numpy", "msgpack", "xxhash", "zmq", "pydantic", "pydantic_settings", "tensorboard"}
LIGHT = [
    "shared.types",
    "shared.codec",
    "shared.config",
    "shared.transport",
    "learner.tickets.staleness",
    "shared.metrics",
    "shared.log",
    "learner.tickets.book",
    "learner.tickets.sources",
    "learner.tickets.server",
    "actor.loop",
    "envs.base",
]
HEAVY = {"torch", "transformers", "triton", "tensorboard", "tensorflow"}


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported(path: Path) -> set[str]:
    """The top-level names that a module imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where a module comes from"
            assert node.module is not None
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_a_package_imports_only_the_packages_it_may(package: str) -> None:
    assert modules(package)
    for path in modules(package):
        assert imported(path) & OURS <= ALLOWED[package], path
        assert "tests" not in imported(path), path


def test_shared_needs_only_its_few_libraries() -> None:
    for path in modules("shared"):
        foreign = imported(path) - OURS - set(sys.stdlib_module_names)
        assert foreign <= SHARED_THIRD_PARTY, path


def test_packages_hold_no_code_of_their_own() -> None:
    """A docstring at most; `kernels`, whose modules all need torch anyway, names its functions."""
    for package in OURS - {"kernels"}:
        for path in (ROOT / package).rglob("__init__.py"):
            body = ast.parse(path.read_text(encoding="utf-8")).body
            assert all(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in body), path


def test_light_modules_import_nothing_heavy() -> None:
    code = f"import sys, {', '.join(LIGHT)}; print(*sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


def test_an_actor_process_starts_without_torch() -> None:
    load = "PreTrainedTokenizerFast.from_pretrained('launch/models/colour_tiny')"
    code = f"import sys; from actor.worker import PreTrainedTokenizerFast; {load}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.stdout.strip() == "False", done.stderr
