"""A task with one command: the plan for every model, what it says, and what it refuses."""

from __future__ import annotations

import json
import re
import shlex
import socket
from pathlib import Path

import pytest

from envs.geometry.triangles import rows
from envs.row_files import write_rows
from launch import run
from launch.catalog import MODELS, tasks
from launch.doctor_checks.hardware import Gpu
from launch.recipe_fields import set_fields
from launch.task_run import session
from launch.task_run.run_commands import chosen_fields
from launch.task_run.run_request import resolve, run_parser
from learner.plan import hardware_page, machines
from learner.plan.fit import setting_of
from learner.plan.gpu_split import DoesNotFit, Workload, plan
from learner.plan.memory_use import host_memory, memory, usable_bytes
from shared.config.recipe import load_recipe
from shared.families.registry import find_sizes

ON_GPUS = ("sokoban", "geo3k", "geo3k_multi_turn", "geo3k_multi_turn_thinking", "geo3k_multi_turn_long", "sokoban_long",
           "geo3k_multi_turn_one_gpu", "sokoban_vagen", "frozenlake_vagen")  # fmt: skip
SMALL = "Qwen3-VL-2B-Instruct"


def dry(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """A dry run: its exit code, and what it printed and complained of."""
    code = run.main([*map(str, words), "--dry-run"])
    said = capsys.readouterr()
    return code, said.out, said.err


def planned(capsys: pytest.CaptureFixture[str], *words: object) -> dict:
    code, out, err = dry(capsys, *words, "--json")
    assert code == 0, err
    (line,) = out.splitlines()
    return json.loads(line)


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The one line of a refusal."""
    assert run.main([*map(str, words)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("error: ") and said.err.count("\n") == 1
    return said.err


def command(out: str, program: str) -> list[str]:
    (line,) = [line for line in out.splitlines() if program in line]
    return shlex.split(line)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a dry run asks no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


# ---------------------------------------------------------------------- the plan


@pytest.mark.slow
@pytest.mark.parametrize("task", ON_GPUS)
def test_every_model_fits_as_its_plan_says_or_is_refused_with_what_does(task: str) -> None:
    """What fits is judged again from the recipe that would run, by the plan of the learner's memory."""
    kind, host = "Thinking" if task.endswith("thinking") else "Instruct", machines.machine("h100")
    given = load_recipe(f"launch/recipes/{task}.toml")
    for model in [each for each in MODELS if each.startswith("Qwen3") and each.endswith(kind)]:
        sizes = find_sizes(model)
        job = Workload(set_fields(given, {"model.path": f"Qwen/{model}"}), sizes, host)
        for gpus in (2, 4, 8, 64):
            try:
                found = plan(job, gpus)
            except DoesNotFit as refusal:
                assert re.search(
                    r"does not fit \d+ GPUs .*: (with --learner.lora.rank|\d+ such GPUs are enough|Qwen3-VL-\S+ fits)",
                    str(refusal),
                )
                continue
            recipe = set_fields(job.recipe, chosen_fields(job, found))
            setting, engines = setting_of(recipe, found.ranks, host.gpu_bytes), found.engines
            assert found.ranks + engines.count * engines.tensor_parallel == gpus
            assert memory(sizes, setting).total <= usable_bytes(host.gpu_bytes)
            assert host_memory(sizes, setting).total <= host.host_bytes
            held = recipe.engine.mem_fraction * host.gpu_bytes - 2 * sizes.parameters / recipe.engine.tensor_parallel
            tokens = recipe.model.max_context * engines.token_bytes(sizes) / recipe.engine.tensor_parallel
            assert held > 2 * tokens  # room for two whole episodes at least
            assert found.seconds > max(found.learning, found.generating) > 0


def test_the_next_number_of_gpus_that_a_refusal_names_has_room() -> None:
    recipe, host = load_recipe("launch/recipes/geo3k.toml"), machines.machine("h100")
    job = Workload(
        set_fields(recipe, {"model.path": "Qwen/Qwen3-VL-235B-A22B-Instruct"}), find_sizes("Qwen3-VL-235B-A22B"), host
    )
    with pytest.raises(DoesNotFit, match=r"does not fit 8 GPUs .* 24 such GPUs are enough, or Qwen3-VL-32B-Instruct"):
        plan(job, 8)
    assert plan(job, 24).gpus == 24
    with pytest.raises(DoesNotFit):
        plan(job, 16)


def test_a_dry_run_says_the_arithmetic_of_a_batch_what_it_takes_and_what_it_costs(capsys) -> None:
    words = ["geo3k_multi_turn", "--model", SMALL, "--gpus", 4, "--price", 2.5, "--episode-tokens", 2000]
    code, out, _ = dry(capsys, *words)
    assert code == 0 and "planned, nothing of it measured" in out
    assert "64 groups x 8 episodes = 512 episodes x 2000 tokens = 1.02 M tokens" in out
    told = planned(capsys, *words)
    assert f"microbatches: {told['microbatches_of_rank']} a rank" in out
    assert told["hours"] * 3600 > told["steps"] * told["seconds"]["step"]
    assert told["dollars"] == pytest.approx(told["hours"] * 4 * 2.5)
    assert f"${told['dollars']:,.0f}" in out


def test_fields_that_the_user_sets_stay_and_the_rest_is_chosen_around_them(capsys) -> None:
    words = ["geo3k", "--model", SMALL, "--gpus", 8]
    mesh = ["--learner.parallel.context", 2, "--learner.parallel.microbatch_tokens", 5000, "--engine.count", 6]
    told = planned(capsys, *words, *mesh)
    assert (told["learner_ranks"], told["engines"]) == (2, 6)
    assert (
        not {"learner.parallel.context", "engine.count", "learner.parallel.microbatch_tokens"} & told["fields"].keys()
    )
    assert told["microbatches_of_rank"] == 64 * 8 * 4096 / (2 * 5000) // 1 + 1
    assert planned(capsys, *words, "--engine.tensor_parallel", 2)["engine_tensor_parallel"] == 2


def test_what_the_environment_sets_stays_too(capsys, monkeypatch) -> None:
    monkeypatch.setenv("PRONK_ENGINE__COUNT", "2")
    assert planned(capsys, "geo3k", "--model", SMALL, "--gpus", 8)["engines"] == 2


def test_a_smaller_card_has_its_state_on_the_host_only_where_it_must(capsys) -> None:
    told = planned(capsys, "sokoban", "--gpus", 2, "--gpu", "rtx4090")
    assert told["fields"]["learner.parallel.offload"] and "GPUs have room for it" in told["notes"][0]
    assert "learner.parallel.offload" not in planned(capsys, "sokoban", "--gpus", 8, "--gpu", "rtx4090")["fields"]
    assert "does not fit" in refused(
        capsys, "sokoban", "--gpus", 2, "--gpu", "rtx4090", "--dry-run", "--learner.parallel.offload", "false"
    )


def test_a_thinking_model_takes_the_recipe_with_room_for_its_thoughts(capsys) -> None:
    code, out, _ = dry(capsys, "geo3k_multi_turn", "--model", "Qwen3-VL-4B-Thinking", "--gpus", 8)
    assert code == 0 and "launch/recipes/geo3k_multi_turn_thinking.toml, which leaves room" in out
    assert "32768 tokens in all" in out


# ---------------------------------------------------------------------- the commands


def test_a_dry_run_ends_with_the_commands_that_would_run(capsys, tmp_path) -> None:
    code, out, _ = dry(capsys, "sokoban", "--model", "Qwen3-VL-4B-Instruct", "--gpus", 4, "--folder", tmp_path)
    made, place = tmp_path / "data" / "sokoban", tmp_path / "models" / "Qwen3-VL-4B-Instruct"
    assert code == 0 and f"python launch/prepare.py sokoban --out {made}" in out
    assert f"hf download Qwen/Qwen3-VL-4B-Instruct --local-dir {place}" in out
    words = command(out, "launch/local.py")
    recipe = load_recipe(words[3], words[6:])
    assert words[:6] == ["python", "launch/local.py", "--config", "launch/recipes/sokoban.toml", "--ranks", "2"]
    assert (recipe.model.path, recipe.data.source) == (str(place), str(made / "train.parquet"))
    assert recipe.run.name == "sokoban_Qwen3-VL-4B-Instruct"  # it resumes no run of the recipe's own model


def test_the_commands_of_several_hosts_give_each_host_its_part(capsys) -> None:
    code, out, _ = dry(capsys, "geo3k", "--model", "Qwen3-VL-30B-A3B-Instruct", "--gpus", 32, "--gpu", "h200")
    learner, actors = command(out, "launch/learner.py"), command(out, "launch/actors.py")
    assert code == 0 and "--learner.bind" in learner and "--engine.host" in actors
    fields = actors[2 : actors.index("--actor.learner")]
    recipe = load_recipe(fields[1], fields[2:])
    assert recipe.engine.count * recipe.engine.tensor_parallel == 8
    words = command(out, "launch/cluster.py")
    assert words[2:5] == ["submit", "--on", "slurm"] and words[5 : 5 + len(fields)] == fields
    cluster = load_recipe(words[6], words[7:]).cluster
    assert (cluster.learner_nodes + cluster.engine_nodes) * cluster.gpus_per_node == 32


def test_a_saved_recipe_is_the_one_that_would_run(capsys, tmp_path) -> None:
    saved, words = tmp_path / "r.toml", ["geo3k_multi_turn", "--model", SMALL, "--gpus", 8]
    words += ["--env.args", '{"tolerance": 0.05}', "--engine.flags", '{"a b": ["\u00fc", true]}']
    words += ["--learner.objective.mask_token_ratio", "[0.5, 2]"]
    _, out, _ = dry(capsys, *words)
    shown = command(out, "launch/local.py")
    code, out, _ = dry(capsys, *words, "--save", saved)
    assert code == 0 and command(out, "launch/local.py")[3] == str(saved)
    assert load_recipe(str(saved)) == load_recipe(shown[3], shown[shown.index("--ranks") + 2 :])


def test_a_secret_is_not_saved_and_a_null_is_refused(capsys, tmp_path) -> None:
    saved = tmp_path / "r.toml"
    code, _, _ = dry(capsys, "colour_tiny", "--save", saved, "--alarms.webhook", "https://host/secret")
    assert code == 0 and "secret" not in saved.read_text() and "PRONK_ALARMS__WEBHOOK" in saved.read_text()
    null = ["colour_tiny", "--save", saved, "--learner.objective.rho_bar", "null", "--dry-run"]
    assert "learner.objective.rho_bar = null" in refused(capsys, *null)


@pytest.mark.parametrize("task", [task for task in tasks() if task not in ON_GPUS])
def test_a_small_task_needs_no_gpu(task, capsys) -> None:
    code, out, _ = dry(capsys, task)
    assert code == 0 and "no GPU" in out
    assert command(out, "launch/local.py")[2:] == ["--config", f"launch/recipes/{task}.toml"]


@pytest.mark.parametrize("task", ON_GPUS)
def test_a_task_for_gpus_has_a_small_twin_to_be_told_of(task) -> None:
    assert session._tiny(task) in tasks()


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["geo3k", "--env.args", '{"tolerence": 1}'], "has no setting 'tolerence'; did you mean 'tolerance'?"),
        (["sokobann"], "recipe 'sokobann' does not exist; did you mean sokoban?"),
        (["sokoban", "--model", "Qwen3-VL-8B-Instrukt"], "it is no folder here; did you mean Qwen3-VL-8B-Instruct"),
        (["sokoban", "--model", "Qwen3-VL-7B"], "did you mean Qwen3-VL-8B or"),
        (["sokoban", "--model", "launch"], "unknown model 'launch'"),
        (["sokoban", "--gpus", "-1", "--dry-run"], "--gpus -1: at least 1"),
        (["sokoban", "--gpus", "12", "--dry-run"], "--gpus 12: several hosts have a multiple of 8"),
        (["sokoban", "--dry-run"], "say how many with --gpus N; there is room on 1 or more (h100, 80 GB)"),
        (["sokoban", "--gpus", "4"], "sokoban needs GPUs, and there are none here"),
        (["geo3k", "--gpus", "16"], "docs/tutorials/cluster.md"),
        (["colour_tiny", "--gpus", "2"], "colour_tiny computes on the CPU; leave --gpus out"),
        (["colour_tiny", "--model", SMALL], "give the folder of a small model"),
        (["colour_tiny", "--dataset", "x.parquet"], "this task draws its own samples"),
        (["geo3k", "--dataset", "x.parquet", "--gpus", "4"], "--dataset x.parquet: there is no such file"),
        (["geo3k", "--dataset", "x", "--gpus", "4"], "neither a file here nor a hub name"),
        (["geo3k", "--gpus", "4", "--learner.lrr", "1"], "did you mean --learner.optimizer.lr?"),
        (["geo3k", "--gpus", "4", "--model.max_context", "300000", "--dry-run"], "longer than the model's"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(words, expected, capsys) -> None:
    assert expected in refused(capsys, *words)


def test_a_recipe_of_ones_own_for_the_cpu_is_told_how_to_use_gpus(tmp_path, capsys) -> None:
    own = tmp_path / "own.toml"
    own.write_text(f'[model]\npath = "{SMALL}"\n[env]\nmodule = "envs.colour"\n')
    assert 'leave --gpus out, or set learner.device = "cuda"' in refused(capsys, own, "--gpus", 2, "--dry-run")


def test_a_run_has_another_name_only_with_another_model(monkeypatch, tmp_path) -> None:
    def name(*words: str) -> str:
        options, overrides = run_parser("").parse_known_args(words)
        return resolve(options, overrides).recipe.run.name

    folder = str(Path("launch/models/geo3k_tiny").resolve())
    monkeypatch.chdir(tmp_path)  # the recipe's model is there another path than the one that is written in it
    assert name("colour_tiny") == "colour_tiny"
    assert name("colour_tiny", "--model", folder) == "colour_tiny_geo3k_tiny"
    assert name("colour_tiny", "--model.path", folder) == "colour_tiny_geo3k_tiny"


@pytest.mark.parametrize(
    ("task", "flag", "columns", "expected"),
    [
        ("geo3k", "--dataset", {"text": "1 + 1", "label": "2"}, "no column problem and no column answer"),
        ("geo3k_multi_turn", "--dataset", {"problem": "1 + 1"}, "no column answer"),
        ("sokoban", "--dataset", {"level": "####"}, "no column extra_info.env_config"),
        ("sokoban", "--data.source", {"prompt": "####"}, "no column extra_info.env_config"),
    ],
)
def test_a_dataset_without_the_columns_is_one_line_that_names_them(
    task, flag, columns, expected, capsys, tmp_path
) -> None:
    file = tmp_path / "own.jsonl"
    write_rows(file, [columns])
    line = refused(capsys, task, flag, file, "--gpus", 4, "--dry-run")
    assert expected in line and f"it has: {', '.join(columns)}" in line


def test_an_epoch_is_counted_from_data_that_is_here(capsys, tmp_path) -> None:
    file = tmp_path / "own.parquet"
    write_rows(file, rows(6, "train"))
    own = ["geo3k", "--gpus", 4, "--data.source", file, "--learner.groups_per_step", 16]
    assert planned(capsys, *own)["steps_of_epoch"] == 6 / 16
    code, out, _ = dry(capsys, "geo3k", "--gpus", 4, "--dataset", file, "--folder", tmp_path)
    assert code == 0 and f"--from {file} --out {tmp_path / 'data' / 'geo3k-own-'}" in out


def test_more_gpus_than_the_machine_has_are_refused_and_its_own_are_planned_with(capsys, monkeypatch) -> None:
    monkeypatch.setattr(session, "gpus_here", lambda: [Gpu("NVIDIA H200", int(141e9), int(140e9))] * 4)
    monkeypatch.setattr(session, "available_bytes", lambda: int(1e12))
    assert "--gpus 8: this machine has 4" in refused(capsys, "geo3k", "--gpus", 8)
    assert planned(capsys, "geo3k") | {"gpus": 4, "gpu": "h200", "gpu_gb": 141.0} == planned(capsys, "geo3k")


def test_every_task_has_a_recipe_and_every_model_sizes() -> None:
    assert {*ON_GPUS} < {*tasks()} and all(Path(f"launch/recipes/{task}.toml").exists() for task in tasks())
    assert len([model for model in MODELS if model.startswith("Qwen3-VL") and find_sizes(model).parameters > 1e9]) == 12


ROW = re.compile(r"\| (Qwen3-VL-\S+) \| (\d+) (\w+) \| (\d+) \| (\d+) \| ([\d,]+) \| ([\d,]+) at ([\d.]+) \|")
RUNGS = {"tutorials/one-gpu": "geo3k_multi_turn_one_gpu", "how-to/run-a-task": "geo3k_multi_turn"}
RUNGS["tutorials/cluster"] = "geo3k_multi_turn"


@pytest.mark.slow
@pytest.mark.parametrize("page", RUNGS)
def test_each_rungs_table_is_what_the_plan_says_today(page: str, capsys) -> None:
    found = ROW.findall(Path(f"docs/{page}.md").read_text(encoding="utf-8"))
    assert len(found) >= 4
    for model, gpus, gpu, *said, price in found:
        words = ["--model", f"{model}-Instruct", "--gpus", gpus, "--gpu", gpu, "--price", price]
        told = planned(capsys, RUNGS[page], *words)
        values = (told["bytes_of_host"] / 1e9, told["seconds"]["step"], told["hours"], told["dollars"])
        assert [f"{value:.0f}" for value in values] == [number.replace(",", "") for number in said]


@pytest.mark.slow
def test_the_page_of_hardware_is_what_the_plan_says_today() -> None:
    wrong = "python -m learner.plan --page docs/figures/hardware.md writes it anew"
    assert Path("docs/figures/hardware.md").read_text(encoding="utf-8") == hardware_page.page(), wrong


@pytest.mark.parametrize("name", ["Qwen3-VL-8B", "qwen3-vl-8b-instruct", "Qwen/qwen3-vl-8b"])
def test_a_published_model_is_found_however_its_name_is_written(name: str, capsys) -> None:
    assert planned(capsys, "geo3k", "--model", name, "--gpus", 8)["model"] == "Qwen/Qwen3-VL-8B-Instruct"


def test_a_model_of_another_family_is_told_which_families_run(capsys) -> None:
    line = refused(capsys, "geo3k", "--model", "InternVL3-8B", "--gpus", 8)
    assert "the published models that run are of Qwen3-VL, Qwen3-VL-MoE, Qwen2.5-VL, Qwen3, Qwen3.5" in line


def test_a_recipe_of_ones_own_is_planned_by_its_path(tmp_path, capsys) -> None:
    (tmp_path / "mine.toml").write_text(Path("launch/recipes/geo3k.toml").read_text().replace("= 300", "= 77"))
    assert planned(capsys, tmp_path / "mine.toml", "--gpus", 8)["steps"] == 77


def test_the_commands_of_a_dry_run_build_sglangs_environment_where_it_is_missing(tmp_path, capsys) -> None:
    words = ["geo3k", "--gpus", 4, "--engine.sglang_env", tmp_path / "none"]
    assert "  make sglang-env\n" in dry(capsys, *words)[1]
    (tmp_path / "none").mkdir()
    assert "make sglang-env" not in dry(capsys, *words)[1]


def test_a_run_of_very_many_epochs_is_told_what_would_be_fewer(capsys, tmp_path) -> None:
    write_rows(tmp_path / "own.parquet", rows(6, "train"))
    own = [
        "geo3k",
        "--gpus",
        4,
        "--data.source",
        tmp_path / "own.parquet",
        "--data.eval_source",
        tmp_path / "own.parquet",
    ]
    assert "the run: 3200.0 epochs, which is a lot for so few samples: --learner.total_steps" in dry(capsys, *own)[1]
