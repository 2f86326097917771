"""Versions of NCCL: read from an environment's folder, compared before engines join, and refused in one line."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from launch.engines import host_engines
from launch.engines.kinds.engine_kind import gpu_env
from learner.weights import compatible_engines
from shared.config.recipe import ConfigError, load_recipe
from shared.engine import nccl_variables
from shared.engine.engine_api import EngineClient
from shared.engine.engine_messages import ServerInfo, parse_server_info
from shared.engine.nccl_versions import (
    NCCL_OF_TORCH,
    SGLANG_TESTED,
    TORCH_OF_SGLANG,
    environment_in,
    loaded_nccl,
    nccl_of_sglang,
    nccl_of_torch,
    unequal_nccl,
)
from tests.support.engines import false_engine, says
from tests.support.environments import made_up_environment
from tests.support.publishing import FAST, policy, publishing
from tests.support.tiny import running_engine

__all__ = ["policy"]  # a fixture


def pins(file: str) -> dict[str, str]:
    return dict(line.split("==") for line in Path(file).read_text().splitlines() if "==" in line and line[0] != "#")


@pytest.mark.parametrize(("number", "version"), [(23007, "2.30.7"), (22809, "2.28.9")])
def test_the_version_that_counts_is_that_of_the_library_that_is_loaded(tmp_path, number, version):
    source, library = tmp_path / "nccl.c", tmp_path / "libnccl.so.2"
    source.write_text(f"int ncclGetVersion(int *version) {{ *version = {number}; return 0; }}")
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    assert loaded_nccl(str(library)) == version


def test_without_a_library_there_is_no_version(tmp_path):
    assert loaded_nccl(str(tmp_path / "libnccl.so.2")) == ""


def test_an_environment_is_read_from_its_folder_alone(tmp_path):
    made_up_environment(tmp_path, torch="2.14.1", nvidia_nccl_cu13="2.30.7", sglang="0.5.23", transformers="5.19.0")
    found = environment_in(tmp_path)
    assert (found.torch, found.nccl, found.sglang, found.transformers) == ("2.14.1", "2.30.7", "0.5.23", "5.19.0")


@pytest.mark.parametrize(("torch", "nccl"), [("2.13.0", "2.29.7"), ("2.13.0+cpu", ""), ("1.0", "")])
def test_without_its_package_nccl_is_what_torchs_wheel_brings(tmp_path, torch, nccl):
    made_up_environment(tmp_path, torch=torch)
    assert environment_in(tmp_path).nccl == nccl


def test_a_folder_without_an_environment_has_nothing(tmp_path):
    assert environment_in(tmp_path / "nowhere").torch == ""


def test_the_constraints_for_gpus_give_the_learner_the_nccl_of_the_tested_sglang():
    ours, theirs = pins("constraints-gpu.txt")["torch"], TORCH_OF_SGLANG[SGLANG_TESTED]
    assert nccl_of_torch(ours) == nccl_of_torch(theirs) == pins("constraints-gpu.txt")["nvidia-nccl-cu13"]
    assert SGLANG_TESTED in Path("launch/engine_env.py").read_text()


def test_the_constraints_differ_in_torch_and_what_it_asks_for_alone():
    cpu, gpu = pins("constraints.txt"), pins("constraints-gpu.txt")
    different = {name for name in cpu | gpu if cpu.get(name) != gpu.get(name)}
    assert {name for name in different if not name.startswith(("nvidia-", "cuda-"))} == {"torch", "triton"}


def test_every_torch_that_a_known_sglang_asks_for_is_known():
    assert set(TORCH_OF_SGLANG.values()) <= set(NCCL_OF_TORCH)


def test_unequal_versions_are_one_line_with_a_cure_and_unknown_ones_pass():
    line = unequal_nccl("2.29.7", "2.30.7")
    assert "2.29.7" in line and "nvidia-nccl-cu13==2.30.7" in line and "\n" not in line
    assert unequal_nccl("2.30.7", "2.30.7") == unequal_nccl("", "2.30.7") == unequal_nccl("2.30.7", "") == ""


def test_an_engine_tells_its_nccl_itself_or_by_sglangs_version():
    assert parse_server_info({"engine": "embedded", "nccl": "2.30.7"}).nccl == "2.30.7"
    assert parse_server_info({"version": "0.5.23", "internal_states": [{"nccl": "2.28.9"}]}).nccl == "2.28.9"
    assert nccl_of_sglang("0.5.23") == "2.30.7"
    assert parse_server_info({"version": "0.5.23", "internal_states": [{}]}).nccl == "2.30.7"
    for info in ({"version": "9.9"}, {"nccl": 7}, None):
        assert parse_server_info(info).nccl == ""


def test_an_engine_with_another_nccl_is_left_out_and_named(ranks, monkeypatch):
    monkeypatch.setattr(compatible_engines, "loaded_nccl", lambda: "2.29.7")
    good, bad = EngineClient("http://good:1"), EngineClient("http://bad:1")
    members = {good: ServerInfo(nccl="2.29.7"), bad: ServerInfo(nccl="2.30.7")}
    fit, refused = compatible_engines.select_compatible(members, "nccl", ranks)
    assert [*fit] == [good]
    assert "NCCL 2.30.7, the learner 2.29.7" in refused["http://bad:1"]
    alone = {bad: members[bad]}
    assert compatible_engines.select_compatible(alone, "nccl", ranks, others_may_join=True) == ({}, refused)
    assert compatible_engines.select_compatible(members, "gloo", ranks) == (members, {})


def test_a_publication_is_refused_at_once_where_no_engine_has_the_learners_nccl(folder, policy, ranks, monkeypatch):
    monkeypatch.setattr(compatible_engines, "loaded_nccl", lambda: "2.29.7")
    with running_engine(folder) as (url, app), publishing(policy, ranks, replace(FAST, backend="nccl")) as publisher:
        monkeypatch.setattr(EngineClient, "server_info", telling(EngineClient.server_info, nccl="2.30.7"))
        before = app.scheduler.weight_version
        with pytest.raises(ValueError, match=f"engine {re.escape(url)}: it has NCCL 2.30.7, the learner 2.29.7"):
            publisher.publish(1, [url])
        assert app.scheduler.weight_version == before


def test_an_engine_in_trouble_may_yet_take_weights_so_that_another_of_the_wrong_version_ends_no_run(
    folder, policy, ranks, monkeypatch
):
    monkeypatch.setattr(compatible_engines, "loaded_nccl", lambda: "2.29.7")
    busy = {"/server_info": says({"detail": "busy"}, 503)}
    with (
        running_engine(folder) as (url, _),
        false_engine(busy) as (other, _),
        publishing(policy, ranks, replace(FAST, backend="nccl")) as publisher,
    ):
        monkeypatch.setattr(EngineClient, "server_info", telling(EngineClient.server_info, nccl="2.30.7"))
        told = publisher.publish(1, [url, other])
        assert (told["publish/engines"], told["publish/dropped"]) == (0, 2)


def telling(capabilities, **changes):
    async def changed(self, *arguments):
        return replace(await capabilities(self, *arguments), **changes)

    return changed


def test_a_start_on_gpus_with_two_versions_is_refused(tmp_path, monkeypatch):
    made_up_environment(tmp_path / "own", torch="2.13.0", nvidia_nccl_cu13="2.29.7")
    made_up_environment(tmp_path / "sglang", torch="2.14.1", nvidia_nccl_cu13="2.30.7", sglang="0.5.23")
    monkeypatch.setattr(host_engines.sys, "prefix", str(tmp_path / "own"))
    fields = ("--engine.kind", "sglang", "--engine.sglang_env", str(tmp_path / "sglang"))
    recipe = load_recipe("launch/recipes/sokoban_tiny.toml", [*fields])
    with pytest.raises(ConfigError, match=r"it has NCCL 2\.30\.7, the learner 2\.29\.7"):
        host_engines.check_nccl(recipe)


def test_engines_and_learner_are_told_the_same_of_nccl_and_the_users_word_wins(monkeypatch):
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    env = gpu_env(("0",))
    assert (env["NCCL_CUMEM_ENABLE"], env["NCCL_NVLS_ENABLE"]) == ("0", "1")
    assert gpu_env(()) == {}
    assert all(each.reason for each in nccl_variables.VARIABLES.values())


def test_the_documentation_has_every_known_version_and_every_variable_with_its_reason():
    page = " ".join(Path("docs/how-to/doctor.md").read_text().split())
    versions = {*TORCH_OF_SGLANG, *NCCL_OF_TORCH, *NCCL_OF_TORCH.values()}
    assert [version for version in versions if version not in page] == []
    for name, (value, reason) in nccl_variables.VARIABLES.items():
        assert f"| `{name}` | {value} | {reason} |" in page
