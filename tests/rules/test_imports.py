"""Who may import whom: packages, rooms in their order, no cycle of files; and which modules stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

OURS = ("actor", "envs", "kernels", "launch", "learner", "shared")
PRODUCT = [path for package in OURS for path in sorted(Path(package).rglob("*.py"))]
TESTS = sorted(Path("tests").rglob("*.py"))
ALLOWED = {  # of a package and its sub-packages, but for a sub-package that has a line of its own
    "shared": {"shared"},
    "shared.families": {"kernels", "shared"},  # kernels only where torch is imported too: see LIGHT
    "envs": {"envs", "shared"},
    "actor": {"actor", "envs", "shared"},
    "actor.engine": {"actor.engine", "kernels", "shared"},
    "learner": {"kernels", "learner", "shared"},
    "learner.tickets": {"learner.tickets", "shared"},
    "kernels": {"kernels"},
    "launch": set(OURS),
}
LIBRARIES = {  # all that these may import beside Python's own and ours
    "shared": {"PIL", "aiohttp", "msgspec", "numpy", "pydantic", "pydantic_settings", "xxhash", "zmq"},
    "shared.families": {"numpy", "torch"},  # torch only in modules that are imported when a model is built: see LIGHT
    "learner.tickets": {"msgspec", "numpy", "xxhash"},
}
WITH_CODE = (Path("kernels"), Path("shared/config"), Path("launch/package/pronk"))  # in their __init__.py
LIGHT = [
    "shared.types",
    "shared.families.registry",
    "shared.vision",
    "shared.wire.codec",
    "shared.config",
    "shared.wire.zeromq",
    "shared.metrics",
    "shared.log",
    "learner.tickets.ticket_book",
    "learner.tickets.ticket_server",
    "learner.tickets.sources",
    "learner.tickets.staleness",
    "learner.alarms.alarm_replay",
    "learner.metrics.metric_services",
    "actor.actor_loop",
    "envs.base",
    "launch.actors",
    "launch.agents",
    "launch.dashboard",
    "launch.doctor",
    "launch.evaluate",
    "launch.learner",  # until the recipe is found to be sound
    "launch.local",
    "launch.prepare",
    "launch.sft",
    "launch.curate",
]
HEAVY = {"torch", "transformers", "triton", "tensorboard", "tensorflow", "matplotlib", "scipy", "sklearn", "sympy"}
# The rooms of each package, lowest first: a folder, or a module that stands beside the folders. A room imports only
# rooms that stand before it.
ROOMS = {
    "shared": "this_python redaction log engine_urls types util clocks spans trace_file run_status engine wire config "
    "keys metrics families vision agreement rgb_images recordings",
    "envs": "base answer_tags splits messages states env_loops env_calls env_settings reasoning math_grading tools "
    "loader row_files image_urls row_columns "
    "action_words gymnasium vagen verifiers remote_messages remote env_server "
    "row_prompts math_reward datasets chat_rows boards board_env geometry sokoban sokoban_data frozen_lake maze "
    "sliding_puzzle scene scene_zoom colour no_env geo3k geo3k_multi_turn play check show serve",
    "actor": "engine_pool named_engines journal render history episode actor_loop env_threads custom_rollout isolation "
    "descriptions rewards model_judge turn_sampler agents chat_episode api_sampler rollout api_player worker engine",
    "learner": "run_folder_watch vtrace tickets plan objective distributed batch recording metrics alarms coordinator "
    "model weights training checkpoints export mesh_check setup shutdown guards shared_gpu profile_request "
    "step_profile step_trace learner_loop offline replay",
    "kernels": "heads checks gated low_rank delta_rule reference cpu gemm row_records tiles rows_triton scan_triton "
    "rows tile_passes linear_logprob scan gpu",
    "launch": "processes findings catalog recipe_fields engines hub teachers task_samples recording terminal actors "
    "agents prepare plots local tiny_models doctor_checks task_run clusters cluster curves profile_step "
    "dashboard_server dashboard doctor evaluation evaluate learner run warm_start sft curate sglang_env engine_env "
    "package",
}


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


def is_here(name: str) -> bool:
    """Tell whether a dotted name leads to a file of the repository, in a package or beside them."""
    top = name.partition(".")[0]
    return any(Path(top).glob("*.py")) or Path(f"{top}.py").is_file()


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_a_package_imports_only_what_it_may(package: str) -> None:
    inner = {other for other in ALLOWED if other.startswith(f"{package}.")}
    files = [path for path in PRODUCT if within(name_of(path), {package}) and not within(name_of(path), inner)]
    assert files
    for path in files:
        ours = {name for name in imported(path) if is_here(name)}
        assert [name for name in ours if not within(name, ALLOWED[package])] == [], path
        if package in LIBRARIES:
            foreign = {name.partition(".")[0] for name in imported(path) - ours} - sys.stdlib_module_names
            assert foreign <= LIBRARIES[package], path


def test_a_transport_stays_in_its_room() -> None:
    """Others use the interface (`shared.wire.endpoints`) and the registry (`shared.wire.transports`)."""
    inside = {"zmq", "shared.wire.zeromq", "shared.wire.zeromq_addresses", "shared.wire.connections"}
    wrong = [
        f"{path} imports {name}: use shared.wire.transports instead"
        for path in PRODUCT
        if not within(name_of(path), {"shared.wire"})
        for name in sorted(imported(path))
        if within(name, inside)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_import_leads_back_to_its_file() -> None:
    """Imports in functions and for type checkers count; CycleError names the files."""
    modules = {name_of(path): path for path in PRODUCT}
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        targets = {said if said in modules else said.rpartition(".")[0] for said in imported(path)}
        graph[name] = (targets & modules.keys()) - {name}
    TopologicalSorter(graph).prepare()


def room_of(name: str) -> str:
    return name.split(".")[1] if "." in name else ""


def targets_of(path: Path) -> set[str]:
    """Return the modules of ours that a module imports; a name inside a module counts as that module."""
    modules = {name_of(other) for other in PRODUCT}
    return {said if said in modules else said.rpartition(".")[0] for said in imported(path)} & modules


@pytest.mark.parametrize("package", OURS)
def test_rooms_import_only_rooms_below_them(package: str) -> None:
    order = {room: height for height, room in enumerate(ROOMS[package].split())}
    wrong = []
    for path in PRODUCT:
        if path.parts[0] != package or not (room := room_of(name_of(path))):
            continue
        if room not in order:
            wrong.append(f"{path} stands in no room: add {room!r} to ROOMS[{package!r}] where its imports allow it")
            continue
        for target in sorted(targets_of(path)):
            below = room_of(target)
            if target.split(".")[0] == package and below and order.get(below, -1) > order[room]:
                wrong.append(f"{path} imports {target}, and {below!r} stands above {room!r}: move what both need down")
    assert not wrong, "\n".join(wrong)


def test_each_room_is_there() -> None:
    """A name in ROOMS that nothing bears would let a room of that name come back unseen."""
    rooms = {(path.parts[0], room_of(name_of(path))) for path in PRODUCT}
    listed = {(package, room) for package, names in ROOMS.items() for room in names.split()}
    assert not listed - rooms, f"take out of ROOMS what is no folder and no module: {sorted(listed - rooms)}"


def repeated(names: Iterable[tuple[str, Path]]) -> str:
    """Return a line for each name that occurs more than once, with its files."""
    files: dict[str, list[str]] = {}
    for name, path in names:
        files.setdefault(name, []).append(str(path))
    return "\n".join(f"{name}: {', '.join(paths)}" for name, paths in files.items() if len(paths) > 1)


def test_module_names_are_told_apart() -> None:
    """An editor's search for a file finds one."""
    lines = repeated((path.name, path) for path in PRODUCT if path.name not in ("__init__.py", "__main__.py"))
    assert not lines, f"give all but one of these modules another name:\n{lines}"


def test_class_names_are_told_apart() -> None:
    """One name is one thing, in whichever package."""
    nodes = ((node, path) for path in PRODUCT for node in ast.walk(tree(path)))
    lines = repeated((node.name.lstrip("_"), path) for node, path in nodes if isinstance(node, ast.ClassDef))
    assert not lines, f"give all but one of these classes another name:\n{lines}"


def test_packages_hold_no_code_of_their_own() -> None:
    """A docstring at most, and the look at this Python; `kernels`, whose modules all need torch anyway, names its
    functions, `shared.config` the loader of recipes, and `pronk` what programs import."""
    for path in PRODUCT:
        if path.name == "__init__.py" and path.parent not in WITH_CODE:
            code = [node for node in tree(path).body if ast.unparse(node) != "import shared.this_python"]
            assert all(isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) for node in code), path


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
