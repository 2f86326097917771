"""Runs on a real Slurm cluster of four nodes: two for the learner's ranks, one for engines, one for actors."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator

import pytest

from tests.cluster.local_slurm import LocalSlurm, local_slurm, missing
from tests.cluster.submitted import ENDLESS, ROOT, Submitted


def queue() -> list[str]:
    return subprocess.run(["squeue", "--noheader"], capture_output=True, text=True, timeout=20).stdout.splitlines()


def node_of(job: str) -> str:
    """Where the job runs; empty while it does not."""
    words = ["squeue", "--noheader", "--states=RUNNING", "--jobs", job, "--format", "%N"]
    return subprocess.run(words, capture_output=True, text=True, timeout=20).stdout.strip()


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSlurm]:
    if missing():
        pytest.skip(missing())
    with local_slurm(tmp_path_factory.mktemp("slurm"), nodes=4) as cluster:
        yield cluster


def test_a_run_that_loses_the_node_of_its_engines_gets_another_and_its_actors_follow(slurm, tmp_path):
    """The actors have a node of their own."""
    run = Submitted("slurm", tmp_path, "colour", **{"learner.total_steps": 150, "cluster.actor_nodes": 1})
    said = run.call("submit")
    assert said.returncode == 0 and "logs in" in said.stdout, said.stderr
    engines = json.loads((run.cluster / "jobs.json").read_text())["engines"]
    run.until("three steps", lambda: run.steps() >= 3)
    assert "pronk-colour-learner" in run.call("status").stdout

    node = node_of(engines)
    slurm.lose_node(node)
    run.until("the loss", lambda: not node_of(engines))
    slurm.start_node(node)  # the host boots again, and its daemon tells the controller that the job is gone
    run.until("the run's end", lambda: (run.run / "result.json").exists() and not queue())

    assert json.loads((run.run / "result.json").read_text())["success_after"] >= 0.9
    engines, actors = ((run.cluster / "logs" / f"{part}-0.log").read_text() for part in ("engines", "actors"))
    assert engines.count(" is here: run ") >= 2  # more if Slurm has taken a busy node for a lost one, too
    assert actors.count(" is here: run ") == 1  # they stayed, and followed
    assert actors.count("engines named by the learner: http://") >= 2


def test_a_run_that_is_stopped_leaves_a_checkpoint_from_which_the_next_submission_goes_on(slurm, tmp_path):
    run = Submitted("slurm", tmp_path, "stopped", **{"learner.total_steps": ENDLESS})
    assert run.call("submit").returncode == 0
    again = run.call("submit")
    assert again.returncode == 2 and "are in the queue: stop them first" in again.stderr
    run.until("two steps", lambda: run.steps() >= 2)
    assert run.call("stop").returncode == 0
    run.until("an empty queue", lambda: not queue())
    assert any((run.run / "checkpoints").iterdir())
    before = run.steps()
    assert before < ENDLESS
    assert "no job of this run" in run.call("stop").stdout and "is in the queue" in run.call("status").stdout

    shorter = Submitted("slurm", tmp_path, "stopped", **{"learner.total_steps": before + 20})
    assert shorter.call("submit").returncode == 0
    run.until("the run's end", lambda: (run.run / "result.json").exists() and not queue())
    assert run.steps() == before + 20


def test_no_key_is_in_a_script_and_keys_that_others_can_read_are_refused(slurm, tmp_path):
    run = Submitted("slurm", tmp_path, "keys", **{"cluster.slurm.options": '["--begin=now+1hour"]'})
    assert run.call("submit").returncode == 0
    values = run.secrets()
    written = "".join(path.read_text() for path in run.cluster.glob("*.*") if path.is_file())
    assert len(values) >= 6 and not any(value in written for value in values)
    assert run.call("stop").returncode == 0
    run.until("an empty queue", lambda: not queue())
    (run.cluster / "keys" / "engine.key").chmod(0o644)
    refused = run.call("submit")
    assert refused.returncode == 2 and "open to others (mode 0644)" in refused.stderr


@pytest.mark.parametrize("field", ["partition", "actor_partition"])
def test_a_partition_that_is_not_there_is_one_line_with_those_that_are(slurm, tmp_path, field):
    refused = Submitted("slurm", tmp_path, "lost", **{f"cluster.slurm.{field}": "gpu"}).call("submit")
    assert refused.returncode == 2
    assert refused.stderr == f"error: cluster.slurm.{field} = 'gpu' is not there; choose one of main\n"
    assert not (tmp_path / "lost.cluster" / "keys").exists()


def test_a_mistake_that_one_of_several_hosts_finds_is_not_tried_again(tmp_path):
    """srun ends the others, and says their code."""
    commands = tmp_path / "bin"
    commands.mkdir()

    def stand_in(name: str, *lines: str) -> None:
        (commands / name).write_text("\n".join(["#!/bin/bash", *lines, ""]))
        (commands / name).chmod(0o755)

    stand_in("srun", 'while [ "$1" != bash ]; do shift; done', '"$@"', "exit 137")
    stand_in("scontrol", f"touch {tmp_path}/requeued")
    stand_in("sleep")
    run = Submitted("slurm", tmp_path, "wrong")
    assert run.call("render").returncode == 0
    script = re.sub(r"(?m)^\. .*/bin/activate$", f"PATH={commands}:$PATH", (run.cluster / "learner.sbatch").read_text())
    for code, ended in ((2, 2), (1, 137)):
        stand_in("python", f"exit {code}")
        env = os.environ | {"SLURM_CPUS_ON_NODE": "1", "SLURM_JOB_ID": "1"}
        assert subprocess.run(["bash", "-c", script], env=env, timeout=60).returncode == ended
        assert (tmp_path / "requeued").exists() == (code == 1)


def test_scripts_are_rendered_without_slurm_and_are_sound_shell(tmp_path):
    more = {"cluster.actor_nodes": 3, "cluster.slurm.actor_partition": "cpu", "cluster.slurm.partition": "gpu"}
    run = Submitted("slurm", tmp_path, "drawn", **more)
    env = dict(os.environ, PATH="/usr/bin:/bin")
    said = subprocess.run(run.command("render"), cwd=ROOT, capture_output=True, text=True, timeout=60, env=env)
    assert said.returncode == 0, said.stderr
    for part, partition in (("learner", "gpu"), ("engines", "gpu"), ("actors", "cpu")):
        script = run.cluster / f"{part}.sbatch"
        assert str(script) in said.stdout
        subprocess.run(["bash", "-n", str(script)], check=True, timeout=10)
        assert f"#SBATCH --partition={partition}\n" in script.read_text()
    assert "--array=0-2\n" in script.read_text() and "--engine.count 0" in script.read_text()
    assert not (run.cluster / "keys").exists()


def test_a_missing_client_is_one_line(tmp_path):
    run = Submitted("slurm", tmp_path, "clientless")
    env = dict(os.environ, PATH=str(tmp_path))
    said = subprocess.run(run.command("submit"), cwd=ROOT, capture_output=True, text=True, timeout=60, env=env)
    assert said.returncode == 2 and said.stderr.startswith("error: sbatch is not on this host: call this on a login")
