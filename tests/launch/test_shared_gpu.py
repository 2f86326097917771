"""A learner and an engine that share one GPU: who has how much of it, what they are told, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from actor.engine.server_settings import parse_arguments
from launch.clusters.host_layout import layout
from launch.engines import host_engines
from launch.engines.gpus import engine_gpus, lock_gpus
from launch.engines.host_engines import check_host, engine_specs
from launch.engines.kinds import sglang_engine
from launch.engines.kinds.sglang_engine import cache_flags
from launch.recipe_fields import set_fields
from launch.task_run.run_commands import chosen_fields
from learner import shared_gpu
from learner.plan.duration import BESIDE_CACHE
from learner.plan.fit import check_recipe, setting_of
from learner.plan.gpu_split import DoesNotFit, Workload, plan
from learner.plan.machines import machine
from learner.plan.memory_use import RESERVED_FRACTION, memory
from learner.shared_gpu import learner_bytes
from shared.config.recipe import ConfigError, load_recipe
from shared.engine.weight_group_names import backend_of
from shared.families.registry import find_sizes

RECIPE = "launch/recipes/geo3k_multi_turn_one_gpu.toml"
GB = 1e9


def recipe(*overrides):
    return load_recipe(RECIPE, [str(part) for part in overrides])


def job(base, kind, **fields):
    return Workload(set_fields(recipe(), {"model.path": base} | fields), find_sizes(base), machine(kind))


def ranks(size, device):
    """As much of the ranks as is looked at: none here has a GPU."""
    return SimpleNamespace(size=size, device=torch.device(device))


def refusal(*overrides):
    with pytest.raises(ConfigError) as caught:
        recipe(*overrides)
    return str(caught.value)


@pytest.mark.parametrize("kind", ["rtx4090", "a100"])
@pytest.mark.parametrize("base", ["Qwen3-VL-2B", "Qwen3-VL-4B"])
def test_adapters_of_2b_and_4b_are_trained_beside_an_engine_on_24_and_80_gb(base, kind):
    asked = job(base, kind)
    found = plan(asked, 1)
    made, sizes = set_fields(asked.recipe, chosen_fields(asked, found)), asked.sizes
    gpu, share = asked.machine.gpu_bytes, made.engine.mem_fraction
    learner = memory(sizes, setting_of(made, 1, gpu * (1 - share))).total
    cache = 2 * made.model.max_context * found.engines.token_bytes(sizes)  # two whole episodes at least
    assert made.engine.shares_gpu and made.learner.parallel.offload == ((base, kind) == ("Qwen3-VL-4B", "rtx4090"))
    assert learner <= gpu * (1 - share) * (1 - RESERVED_FRACTION)
    assert 2 * sizes.parameters + cache + BESIDE_CACHE <= gpu * share
    assert found.seconds == pytest.approx(found.learning + found.generating + found.publishing)


def test_all_weights_of_4b_do_not_fit_24_gb_and_the_refusal_proposes_adapters():
    with pytest.raises(
        DoesNotFit, match=r"does not fit 1 GPU \(rtx4090.*with --learner.lora.rank 32 it does, or 2 such"
    ):
        plan(job("Qwen3-VL-4B", "rtx4090", **{"learner.lora.rank": None}), 1)


def test_the_engine_gets_as_many_tokens_as_the_plan_says(tmp_path, monkeypatch):
    """Not a share of what happens to be free when it starts, which depends on how far the learner has come."""
    for name in ("bin/python", "lib/python3.11/site-packages/sglang/launch_server.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "lib/python3.11/site-packages/sgl_kernel").mkdir()
    monkeypatch.setattr(host_engines, "num_visible", lambda: 1)
    monkeypatch.setattr(sglang_engine, "gpu_bytes", lambda: 24 * GB)
    asked = job("Qwen3-VL-2B", "rtx4090")
    found = plan(asked, 1)
    fields = chosen_fields(asked, found) | {"engine.sglang_env": str(tmp_path)}
    (spec,) = engine_specs(set_fields(asked.recipe, fields))
    words = list(spec.command)
    assert words[words.index("--max-total-tokens") + 1] == str(found.engines.cache_tokens(asked.sizes))
    assert spec.gpus == ("0",) and spec.shares_gpu
    assert spec.env["PRONK_STAGE_WEIGHTS"] == "1"  # they come through the host's memory
    small = set_fields(asked.recipe, fields | {"engine.mem_fraction": 0.32})
    with pytest.raises(
        ConfigError, match=r"engine.mem_fraction = 0.32 of 24 GB leaves room for \d+ tokens .* raise it"
    ):
        engine_specs(small)


def test_an_engine_in_float32_has_half_the_tokens_and_more_for_its_weights():
    sizes, rooms = find_sizes("Qwen3-VL-2B"), []
    for dtype, num_bytes in (("bfloat16", 2), ("float32", 4)):
        made = recipe("--model.dtype", dtype, "--engine.mem_fraction", 0.4)
        tokens = cache_flags(made, 80 * GB)["max-total-tokens"]
        of_token = 2 * sizes.num_layers * sizes.num_kv_heads * sizes.head_dim * num_bytes
        rooms.append(num_bytes * sizes.parameters + tokens * of_token + BESIDE_CACHE)
    assert rooms == [pytest.approx(32 * GB, abs=GB / 1e3)] * 2


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_plan_in_float32_gives_engines_four_bytes_a_number_and_says_whose_seconds_it_reckons(gpus):
    asked = job("Qwen3-VL-2B", "a100", **{"model.dtype": "float32"})
    found, usual = plan(asked, gpus), plan(job("Qwen3-VL-2B", "a100"), gpus)
    engines = found.engines
    room = engines.mem_fraction * asked.machine.gpu_bytes - engines.reserved - 4 * asked.sizes.parameters
    assert engines.cache_tokens(asked.sizes) == int(room // engines.token_bytes(asked.sizes))
    assert engines.token_bytes(asked.sizes) == 2 * usual.engines.token_bytes(asked.sizes)
    assert any("seconds are those of bfloat16" in note for note in found.notes)
    assert not any("float32" in note for note in usual.notes)


def test_the_embedded_engine_shares_a_gpu_too_and_keeps_to_its_part(monkeypatch):
    monkeypatch.setattr(host_engines, "num_visible", lambda: 1)
    (spec,) = engine_specs(recipe("--engine.kind", "embedded", "--engine.mem_fraction", 0.25))
    settings = parse_arguments(spec.command[spec.command.index("actor.engine.server") + 1 :])
    assert (settings.device, settings.mem_fraction, spec.gpus, spec.shares_gpu) == ("cuda", 0.25, ("0",), True)


def test_weights_go_through_the_host_where_nccl_would_join_two_processes_of_one_gpu():
    assert backend_of("cuda", "cuda", shared=True) == "gloo"
    assert backend_of("cuda", "cuda", shared=False) == "nccl"


def test_weights_go_through_the_host_where_either_end_is_on_a_cpu():
    ends = [("cpu", "cpu"), ("cpu", "cuda"), ("cuda", "cpu")]
    assert {backend_of(*devices, shared=False) for devices in ends} == {"gloo"}


def test_an_engine_that_shares_has_the_learners_gpu_and_any_other_the_last():
    assert engine_gpus(recipe().engine, 4) == [(0,)]
    apart = set_fields(recipe(), {"engine.shares_gpu": False}).engine
    assert engine_gpus(apart, 4) == [(3,)]


def test_one_learner_and_one_engine_have_a_gpu_and_nobody_else(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    held = lock_gpus(["0"], "learner rank 0", "learner")
    held += lock_gpus(["0"], "engine on port 1", "engine")
    with pytest.raises(ConfigError, match=r"GPU 0 for engine on port 2 is taken by engine on port 1"):
        lock_gpus(["0"], "engine on port 2", "engine")
    with pytest.raises(ConfigError, match="GPU 0 for another run's rank is taken by"):
        lock_gpus(["0"], "another run's rank")
    for file in held:
        file.close()
    alone = lock_gpus(["0"], "another run's rank")
    with pytest.raises(ConfigError, match="is taken by another run's rank"):
        lock_gpus(["0"], "engine on port 1", "engine")
    alone[0].close()


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["--engine.device", "cpu"], "engine.shares_gpu with engine.device = 'cpu'"),
        (["--engine.count", 2], "engine.shares_gpu with engine.count = 2"),
        (["--engine.tensor_parallel", 2], "engine.shares_gpu with engine.tensor_parallel = 2"),
        (["--engine.mem_fraction", 0], "engine.shares_gpu without engine.mem_fraction"),
    ],
)
def test_a_gpu_that_cannot_be_shared_so_is_refused_in_one_line(overrides, expected):
    assert expected in refusal(*overrides)


def test_ranks_and_devices_that_share_no_gpu_are_refused_before_anything_starts(monkeypatch):
    monkeypatch.setattr(host_engines, "engine_specs", lambda recipe: ())
    with pytest.raises(ConfigError, match="with 2 ranks: an engine shares the GPU"):
        check_host(recipe(), 2)
    with pytest.raises(ConfigError, match="there is no GPU to share"):
        check_host(recipe("--learner.device", "cpu"), 1)
    with pytest.raises(ConfigError, match=r"engine.gpus = \[1\]: the learner has GPU 0"):
        check_host(recipe("--engine.gpus", "[1]"), 1)


def test_hosts_of_a_cluster_share_no_gpu(tmp_path):
    with pytest.raises(ConfigError, match="on a cluster learner and engines have hosts of their own"):
        layout(recipe(), tmp_path)


def test_a_learner_started_by_hand_refuses_the_same():
    cpu, gpus = ranks(1, "cpu"), ranks(2, "cuda")
    with pytest.raises(ValueError, match="there is no GPU to share"):
        learner_bytes(recipe(), cpu)
    with pytest.raises(ValueError, match="with 2 ranks"):
        learner_bytes(recipe(), gpus)
    assert learner_bytes(set_fields(recipe(), {"engine.shares_gpu": False}), cpu) is None


def test_a_learner_that_does_not_fit_its_share_is_refused_before_it_loads(tmp_path, monkeypatch):
    """Qwen3-VL-2B has room on the whole of a GPU of 24 GB, and none beside an engine that has seven tenths of it."""
    monkeypatch.setattr(shared_gpu, "gpu_bytes", lambda ranks: 24 * GB)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl"}')
    asked = recipe("--engine.mem_fraction", 0.7, "--model.path", tmp_path)
    own = learner_bytes(asked, ranks(1, "cuda"))
    assert own == pytest.approx(0.3 * 24 * GB)
    monkeypatch.setattr("learner.plan.fit.sizes_of", lambda config: find_sizes("Qwen3-VL-2B"))
    with pytest.raises(ValueError, match=r"does not fit: a rank needs .* a GPU of 7 GB has room for 6.8"):
        check_recipe(asked, 1, own)
    check_recipe(asked, 1, 24 * GB)


def test_a_learner_keeps_to_its_share_of_the_memory(monkeypatch):
    asked, kept = recipe("--engine.mem_fraction", 0.6), []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: kept.append(share))
    shared_gpu.keep_to_share(asked, ranks(1, "cuda"))
    shared_gpu.keep_to_share(set_fields(asked, {"engine.shares_gpu": False}), ranks(1, "cpu"))
    assert kept == [pytest.approx(0.4)]
