"""Who may import whom, without a cycle; which modules stay light; how large a file, a function and a folder may be."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

OURS = ("actor", "envs", "kernels", "launch", "learner", "shared")
PRODUCT = [path for package in OURS for path in sorted(Path(package).rglob("*.py"))]
TESTS = sorted(Path("tests").rglob("*.py"))
ALLOWED = {  # of a package and its sub-packages, but for a sub-package that has a line of its own
    "shared": {"shared"},
    "envs": {"envs", "shared"},
    "actor": {"actor", "envs", "shared"},
    "actor.engine": {"actor.engine", "kernels", "shared"},
    "learner": {"kernels", "learner", "shared"},
    "learner.tickets": {"learner.tickets", "shared"},
    "kernels": {"kernels"},
    "launch": set(OURS),
}
LIBRARIES = {  # all that these may import beside Python's own and ours
    "shared": {"aiohttp", "msgspec", "numpy", "pydantic", "pydantic_settings", "xxhash", "zmq"},
    "learner.tickets": {"msgspec", "numpy", "xxhash", "zmq"},
}
LIGHT = [
    "shared.types",
    "shared.codec",
    "shared.config",
    "shared.transport",
    "shared.metrics",
    "shared.log",
    "learner.tickets.book",
    "learner.tickets.server",
    "learner.tickets.sources",
    "learner.tickets.staleness",
    "learner.alarms.replay",
    "learner.metrics.services",
    "actor.loop",
    "envs.base",
    "launch.actors",
    "launch.dashboard",
    "launch.doctor",
    "launch.evaluate",
    "launch.learner",  # until the recipe is found to be sound
    "launch.local",
    "launch.prepare",
]
HEAVY = {"torch", "transformers", "triton", "tensorboard", "tensorflow", "matplotlib", "scipy", "sklearn", "sympy"}
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_MODULES = 300, 50, 16  # branches: ruff's C901, at most 15


def name_of(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imported(path: Path) -> frozenset[str]:
    """The dotted names that a module imports anywhere: in functions and for type checkers too."""
    names: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide where a module comes from"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def within(name: str, packages: set[str]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_a_package_imports_only_what_it_may(package: str) -> None:
    inner = {other for other in ALLOWED if other.startswith(f"{package}.")}
    files = [path for path in PRODUCT if within(name_of(path), {package}) and not within(name_of(path), inner)]
    assert files
    for path in files:
        ours = {name for name in imported(path) if within(name, {*OURS, "tests"})}
        assert [name for name in ours if not within(name, ALLOWED[package])] == [], path
        if package in LIBRARIES:
            foreign = {name.partition(".")[0] for name in imported(path) - ours} - sys.stdlib_module_names
            assert foreign <= LIBRARIES[package], path


def test_no_import_leads_back_to_its_file() -> None:
    """Imports in functions and for type checkers count; CycleError names the files."""
    modules = {name_of(path): path for path in PRODUCT}
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        targets = {said if said in modules else said.rpartition(".")[0] for said in imported(path)}
        graph[name] = (targets & modules.keys()) - {name}
    TopologicalSorter(graph).prepare()


def test_packages_hold_no_code_of_their_own() -> None:
    """A docstring at most; `kernels`, whose modules all need torch anyway, names its functions."""
    for path in PRODUCT:
        if path.name == "__init__.py" and path.parts[0] != "kernels":
            assert all(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in tree(path).body)


def test_no_test_module_imports_another_and_only_scripts_change_the_search_path() -> None:
    for path in TESTS:
        ours = [name for name in imported(path) if within(name, {*OURS, "tests"})]
        assert not [name for name in ours if ".test_" in name or name.endswith(".__main__")], path
        if path.name.startswith("test_"):
            assert "sys.path" not in path.read_text(encoding="utf-8").replace('"sys.path"', ""), path


def test_light_modules_import_nothing_heavy() -> None:
    code = f"import sys, {', '.join(LIGHT)}; print(*sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""


def test_an_actor_process_starts_without_torch() -> None:
    load = "PreTrainedTokenizerFast.from_pretrained('launch/models/colour_tiny'); print('torch' in sys.modules)"

    def imports_torch(module: str) -> str:
        code = f"import sys; from {module} import PreTrainedTokenizerFast; {load}"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
        assert done.stdout.strip() in ("True", "False"), done.stderr
        return done.stdout.strip()

    if imports_torch("actor.worker") == "True":
        assert imports_torch("transformers") == "True"  # older ones do, whoever imports them
        pytest.skip("this transformers imports torch by itself")


def test_files_and_functions_are_short() -> None:
    long = set()
    for path in [*PRODUCT, *TESTS]:
        if len(path.read_text(encoding="utf-8").splitlines()) > MAX_FILE_LINES:
            long.add(str(path))
        for node in ast.walk(tree(path)):
            function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if function and node.end_lineno - node.lineno >= MAX_FUNCTION_LINES:
                long.add(f"{path}: {node.name}")
    assert long == set()


def test_folders_hold_few_modules() -> None:
    folders = [path.parent for path in [*PRODUCT, *TESTS] if path.name != "__init__.py" and path.parent.name != "tests"]
    assert [str(folder) for folder in {*folders} if folders.count(folder) > MAX_MODULES] == []
