"""Runs on a real Ray cluster: a head, and four nodes, two for the learner's ranks, others for engines and actors."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.engines.network import free_port
from tests.cluster.submitted import COLOUR, ENDLESS, ROOT, Submitted

ray = pytest.importorskip("ray", reason="pip install --group ray")
from ray.cluster_utils import Cluster  # noqa: E402

from launch.clusters import ray_cluster  # noqa: E402
from launch.clusters.host_layout import CONTAINER, ClusterLayout  # noqa: E402
from shared.config.recipe import ConfigError, load_recipe  # noqa: E402

STORE = {"object_store_memory": 80 * 2**20}


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    port = free_port()
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "include_dashboard": False, "ray_client_server_port": port, **STORE},
    )
    cluster.client = f"ray://127.0.0.1:{port}"
    try:
        for _ in range(4):
            cluster.add_node(num_cpus=1, **STORE)
        yield cluster
    finally:
        cluster.shutdown()


def submitted(nodes: Cluster, folder: Path, name: str, **fields: object) -> Submitted:
    return Submitted("ray", folder, name, **{"cluster.ray.address": nodes.address} | fields)


def node_of(nodes: Cluster, group: str) -> str:
    """The id of the node that the placement group's first host is on; empty while there is none."""
    ray.init(address=nodes.address, namespace="test", log_to_driver=False, logging_level="ERROR")
    try:
        tables = ray.util.placement_group_table().values()
        found = [each for each in tables if each["name"] == group and each["state"] == "CREATED"]
        return found[0]["bundles_to_node_id"][0] if found else ""
    finally:
        ray.shutdown()


def test_a_run_that_loses_the_node_of_its_engines_gets_another_and_learns(nodes, tmp_path):
    run = submitted(nodes, tmp_path, "colour", **{"learner.total_steps": 150})
    said = run.call("submit")
    assert said.returncode == 0 and "logs in" in said.stdout, said.stderr
    again = run.call("submit")
    assert again.returncode == 2 and "runs on this cluster: stop it first" in again.stderr
    run.until("three steps", lambda: run.steps() >= 3)
    table = run.call("status").stdout
    assert [row.split()[0] for row in table.splitlines()] == ["part", "learner", "learner", "engines"], table

    lost = node_of(nodes, "pronk-colour-engines-0")
    nodes.remove_node(next(each for each in nodes.worker_nodes if each.node_id == lost), allow_graceful=False)
    run.until("the loss", lambda: node_of(nodes, "pronk-colour-engines-0") != lost)
    nodes.add_node(num_cpus=1, **STORE)
    run.until("the run's end", lambda: "nothing runs as pronk-colour" in run.call("status").stdout)

    assert "the learner has ended: the run is over" in run.call("status").stdout
    assert json.loads((run.run / "result.json").read_text())["success_after"] >= 0.9
    starts = (run.cluster / "logs" / "engines-0.log").read_text().count("INFO learner tcp://")
    assert starts == 2  # of the actor, which found the learner both times


def test_a_run_that_is_stopped_from_outside_the_cluster_leaves_a_checkpoint(nodes, tmp_path):
    fields = {"cluster.ray.address": nodes.client, "learner.total_steps": ENDLESS, "cluster.actor_nodes": 1}
    run = submitted(nodes, tmp_path, "stopped", **fields)
    said = run.call("submit")
    assert said.returncode == 0, said.stderr
    run.until("two steps", lambda: run.steps() >= 2)
    told = run.call("status")
    assert told.returncode == 0, told.stderr
    table = told.stdout
    assert [row.split()[0] for row in table.splitlines()[1:]] == ["learner", "learner", "engines", "actors"], table
    ended = run.call("stop")
    assert ended.returncode == 0 and "pronk-stopped has ended" in ended.stdout, ended.stderr
    assert any((run.run / "checkpoints").iterdir())
    assert run.steps() < ENDLESS
    assert "the last run: " in run.call("stop").stdout
    written = "".join(path.read_text() for path in run.cluster.glob("*.*") if path.is_file())
    assert len(run.secrets()) >= 6 and not any(secret in written for secret in run.secrets())


def test_a_mistake_in_the_recipe_ends_the_run_and_is_told_by_status(nodes, tmp_path):
    run = submitted(nodes, tmp_path, "wrong", **{"model.path": tmp_path / "nowhere"})
    assert run.call("submit").returncode == 0
    run.until("the run's end", lambda: "nothing runs as" in run.call("status").stdout)
    assert "ended with exit code 2, a mistake in the recipe: logs/" in run.call("status").stdout
    logs = "".join(path.read_text() for path in (run.cluster / "logs").iterdir())
    assert f"error: model.path = '{tmp_path / 'nowhere'}'" in logs


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"cluster.cpus_per_node": 64}, "the run wants 2 x (64 CPUs and 0 GPUs) for its learner"),
        ({"cluster.hours": 2}, "cluster.hours = 2: Ray has no time limits; set it to 0"),
        ({"cluster.ray.address": "127.0.0.1:9"}, "cluster.ray.address = '127.0.0.1:9' cannot be reached"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(nodes, tmp_path, fields, line):
    refused = submitted(nodes, tmp_path, "refused", **fields).call("submit")
    assert refused.returncode == 2 and refused.stderr.startswith(f"error: {line}"), refused.stderr
    assert refused.stderr.count("\n") == 1
    assert not (tmp_path / "refused.cluster" / "keys").exists()


GONE = "psutil.ZombieProcess: PID still exists but it's a zombie"


@pytest.mark.parametrize(("said", "tries"), [(ray_cluster.NOT_STARTED[0], 3), (GONE, 3), ("of another version", 1)])
@pytest.mark.parametrize("at", ["trial", "connection"])
def test_a_head_node_that_started_nothing_for_the_client_is_asked_again_and_any_other_is_not(
    monkeypatch, tmp_path, said, tries, at
):
    asked = []

    def refuse(*_, **__):
        asked.append(at)
        raise ConnectionError(f"python -c failed: {said}")

    monkeypatch.setattr(ray_cluster, "call", refuse if at == "trial" else lambda *_, **__: None)
    monkeypatch.setattr(ray, "init", refuse)
    made = ClusterLayout(load_recipe(COLOUR, ["--cluster.ray.address", "auto"]), tmp_path, CONTAINER)
    with pytest.raises(ConfigError, match=said), ray_cluster._connected(made):
        pass
    assert len(asked) == tries


def test_what_hosts_call_is_rendered_without_ray_and_submitting_says_how_to_install_it(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['ray'] = None\n")
    run = Submitted("ray", tmp_path, "drawn", **{"cluster.actor_nodes": 2})
    env = dict(os.environ, PYTHONPATH=str(tmp_path))
    said = subprocess.run(run.command("render"), cwd=ROOT, capture_output=True, text=True, timeout=60, env=env)
    assert said.returncode == 0, said.stderr
    hosts = (run.cluster / "hosts.txt").read_text()
    assert "torchrun.py --nnodes 2" in hosts and "actors: 2 x" in hosts and "--engine.count 0" in hosts
    refused = subprocess.run(run.command("submit"), cwd=ROOT, capture_output=True, text=True, timeout=60, env=env)
    assert refused.returncode == 2 and refused.stderr.startswith("error: ray is not installed: pip install --group ray")
