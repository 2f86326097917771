"""Kubernetes' manifests and SkyPilot's task against their own schemas; the steps of the container files."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.cluster.submitted import ROOT, Submitted

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install --group manifests")
SKY = ROOT / "build/skypilot/bin/python"
CONTAINERS = ROOT / "launch/clusters/containers"
GPUS = {"learner.device": "cuda", "engine.device": "cuda", "engine.kind": "sglang", "cluster.engine_nodes": 3}
HOURS = {"cluster.hours": 2}


def rendered(on: str, folder: Path, **fields: object) -> list[dict]:
    run = Submitted(on, folder, "drawn", **fields)
    said = run.call("render")
    assert said.returncode == 0, said.stderr
    assert not (run.cluster / "keys").exists()
    name = {"kubernetes": "manifest.yaml", "skypilot": "task.yaml"}[on]
    return list(yaml.safe_load_all((run.cluster / name).read_text()))


def shell_is_sound(script: str) -> bool:
    return subprocess.run(["bash", "-n"], input=script, text=True, timeout=10).returncode == 0


def stand_in(folder: Path, client: str, script: str) -> dict[str, str]:
    """An environment where this script is called instead of the cluster's client; it has its words in `called`."""
    folder.mkdir()
    path = folder / client
    path.write_text(f'#!/bin/bash\necho "$@" >> {folder}/called\n{script}\n')
    path.chmod(0o755)
    return dict(os.environ, PATH=f"{folder}:{os.environ['PATH']}")


def with_client(run: Submitted, action: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(run.command(action), cwd=ROOT, capture_output=True, text=True, timeout=100, env=env)


@pytest.mark.parametrize("fields", [{}, GPUS], ids=["without GPUs", "with GPUs"])
def test_kubernetes_takes_the_manifests(tmp_path, fields):
    documents = rendered("kubernetes", tmp_path, **fields, **HOURS)
    for document in documents:
        kubernetes_validate.validate(document, "1.37", strict=True)
    config, service, learner, engines = documents
    assert 'keys = "/pronk/keys"' in config["data"]["recipe.toml"]
    assert [each["kind"] for each in documents] == ["ConfigMap", "Service", "Job", "Job"]
    pods = [job["spec"]["template"] for job in (learner, engines)]
    for pod in pods:
        container = pod["spec"]["containers"][0]
        assert shell_is_sound(container["command"][2])
        assert pod["spec"]["activeDeadlineSeconds"] == 7200
        assert ("nvidia.com/gpu" in container["resources"]["limits"]) == bool(fields)
        assert {mount["name"] for mount in container["volumeMounts"]} == {
            each["name"] for each in pod["spec"]["volumes"]
        }
    assert service["spec"]["selector"].items() <= pods[0]["metadata"]["labels"].items()
    head = f"{learner['metadata']['name']}-0.{service['metadata']['name']}"
    assert pods[0]["spec"]["subdomain"] == service["metadata"]["name"]
    assert all(head in pod["spec"]["containers"][0]["command"][2] for pod in pods)


def test_kubernetes_has_a_job_for_actors_alone(tmp_path):
    documents = rendered("kubernetes", tmp_path, **GPUS, **{"cluster.actor_nodes": 2})
    kubernetes_validate.validate(documents[-1], "1.37", strict=True)
    engines, actors = documents[-2:]
    spec, container = actors["spec"], actors["spec"]["template"]["spec"]["containers"][0]
    assert (actors["metadata"]["name"], spec["completions"]) == ("pronk-drawn-actors", 2)
    assert shell_is_sound(container["command"][2]) and "--engine.count 0" in container["command"][2]
    assert "nvidia.com/gpu" not in container["resources"]["limits"]
    assert "--actor.groups 0" in engines["spec"]["template"]["spec"]["containers"][0]["command"][2]


def test_skypilot_takes_the_task(tmp_path):
    (task,) = rendered("skypilot", tmp_path, **GPUS, **{"cluster.skypilot.spot": True})
    assert shell_is_sound(task["setup"]) and shell_is_sound(task["run"])
    check = "import sys, sky; task = sky.Task.from_yaml(sys.argv[1]); print(task.num_nodes, task.resources)"
    path = tmp_path / "drawn.cluster" / "task.yaml"
    env = dict(os.environ, HOME=str(tmp_path), PRONK_KEYS="x")
    text = path.read_text().replace("PRONK_KEYS: null", "PRONK_KEYS: given-when-submitted")
    path.write_text(text)
    said = subprocess.run([SKY, "-c", check, path], capture_output=True, text=True, timeout=100, env=env)
    assert said.returncode == 0, said.stderr[-1000:]
    assert said.stdout.startswith("5 ") and "H100" in said.stdout and "[Spot]" in said.stdout


def test_skypilots_hosts_know_their_part_and_unpack_the_keys(tmp_path):
    """The task's own script, on this machine, with a stand-in for Python that prints what it is called with."""
    (task,) = rendered("skypilot", tmp_path, **{"cluster.engine_nodes": 2, "cluster.actor_nodes": 1})
    assert task["num_nodes"] == 5
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "engine.key").write_text("secret")
    packed = subprocess.run(
        f"tar -cz -C {keys} engine.key | base64 -w0", shell=True, capture_output=True, text=True
    ).stdout
    (tmp_path / "project" / "env" / "bin").mkdir(parents=True)
    (tmp_path / "project" / "env" / "bin" / "activate").write_text(
        'python() { echo "$@"; env | grep -c PRONK_KEYS; }\n'
    )
    script = task["run"].replace("/opt/pronk", str(tmp_path / "project")).replace("/pronk/keys", str(tmp_path / "got"))
    script = re.sub(r"^\. .*/bin/activate", ". env/bin/activate", script, flags=re.M).replace("sleep 1", "break")
    said = []
    for rank in range(5):
        addresses = "\n".join(f"10.0.0.{number}" for number in range(1, 6))
        hosts = {"SKYPILOT_NODE_IPS": addresses, "SKYPILOT_NODE_RANK": str(rank)}
        env = dict(os.environ, PRONK_KEYS=packed, **hosts)
        script_now = script.replace("sleep 5", "break")
        ran = subprocess.run(
            ["bash", "-c", script_now], capture_output=True, text=True, timeout=30, env=env, cwd=tmp_path
        )
        said.append(ran.stdout)
    assert (tmp_path / "got" / "engine.key").read_text() == "secret"
    assert stat.S_IMODE((tmp_path / "got").stat().st_mode) == 0o700
    assert all("launch/learner.py" in text and "--rdzv-endpoint 10.0.0.1:" in text for text in said[:2])
    assert all("tcp://10.0.0.1:" in text for text in said[2:])
    assert "--engine.host 10.0.0.3" in said[2] and "--engine.host 10.0.0.4" in said[3]
    assert "--engine.count 0" in said[4] and "--actor.groups 0" not in said[4]
    assert all("--actor.groups 0" in text for text in said[2:4])
    assert all(text.endswith("\n0\n") for text in said)  # what they start does not have the keys in its environment


KUBECTL = """\
case "$*" in
  *namespaces*) printf 'namespace/default\\nnamespace/research\\n' ;;
  *persistentvolumeclaims*) echo persistentvolumeclaim/pronk-runs ;;
  *"get jobs "*) cat "$(dirname "$0")/jobs" 2>/dev/null ;;
  *) echo done ;;
esac
exit 0
"""


def test_kubernetes_keys_go_into_a_secret_by_file_and_a_run_is_not_submitted_twice(tmp_path):
    """kubectl is a stand-in here: no Kubernetes runs on the machine."""
    env = stand_in(tmp_path / "bin", "kubectl", KUBECTL)
    run = Submitted("kubernetes", tmp_path, "colour", **{"cluster.kubernetes.namespace": "research"})
    said = with_client(run, "submit", env)
    assert said.returncode == 0 and "pronk-colour is in namespace research" in said.stdout, said.stderr
    called = (tmp_path / "bin" / "called").read_text()
    assert f"create secret generic pronk-colour-keys --from-file={run.cluster / 'keys'}" in called
    assert f"apply --filename {run.cluster / 'manifest.yaml'}" in called
    written = called + "".join(path.read_text() for path in run.cluster.glob("*.*") if path.is_file())
    assert len(run.secrets()) >= 6 and not any(secret in written for secret in run.secrets())

    (tmp_path / "bin" / "jobs").write_text("job.batch/pronk-colour-learner\n")
    again = with_client(run, "submit", env)
    assert again.returncode == 2 and "job.batch/pronk-colour-learner are there already: stop" in again.stderr
    stopped = with_client(run, "stop", env)
    assert "asked job.batch/pronk-colour-learner to end" in stopped.stdout


@pytest.mark.parametrize(
    ("field", "line"),
    [
        ("namespace", "cluster.kubernetes.namespace = 'gone' is not there; choose one of default, research"),
        ("claim", "cluster.kubernetes.claim = 'gone' is not there; choose one of pronk-runs"),
    ],
)
def test_what_kubernetes_lacks_is_one_line_with_what_it_has(tmp_path, field, line):
    env = stand_in(tmp_path / "bin", "kubectl", KUBECTL)
    refused = with_client(
        Submitted("kubernetes", tmp_path, "lost", **{f"cluster.kubernetes.{field}": "gone"}), "submit", env
    )
    assert (refused.returncode, refused.stderr) == (2, f"error: {line}\n")
    assert not (tmp_path / "lost.cluster" / "keys").exists()


def test_skypilot_gets_the_keys_in_a_file_that_others_cannot_read(tmp_path):
    """sky is a stand-in here: no cloud can be reached."""
    env = stand_in(tmp_path / "bin", "sky", "exit 0")
    run = Submitted("skypilot", tmp_path, "colour")
    said = with_client(run, "submit", env)
    assert said.returncode == 0 and "pronk-colour is with SkyPilot" in said.stdout, said.stderr
    secrets = run.cluster / "secrets.env"
    assert stat.S_IMODE(secrets.stat().st_mode) == 0o600
    value = secrets.read_text().partition("=")[2].strip()
    assert len(value) > 500 and value not in (tmp_path / "bin" / "called").read_text()
    assert value not in (run.cluster / "task.yaml").read_text()


@pytest.mark.parametrize(("on", "client"), [("kubernetes", "kubectl"), ("skypilot", "sky")])
def test_a_missing_client_is_one_line(tmp_path, on, client):
    refused = with_client(Submitted(on, tmp_path, "lost"), "submit", dict(os.environ, PATH=str(tmp_path)))
    assert refused.returncode == 2 and refused.stderr.startswith(f"error: {client} is not on this host: ")
    assert refused.stderr.count("\n") == 1


def steps(file: str) -> list[str]:
    return re.findall(r"^RUN (.*)$", (CONTAINERS / file).read_text(), flags=re.M)


@pytest.mark.skipif(os.geteuid() != 0, reason="a container's steps install packages as root")
def test_the_cpu_containers_steps_make_a_project_that_runs(tmp_path):
    """Without a container engine: in a folder with the project's files alone, on this machine's system."""
    project = tmp_path / "pronk"
    files = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    for name in files.stdout.splitlines():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, project / name)
    for step in steps("cpu.Dockerfile"):
        ran = subprocess.run(["sh", "-c", step], cwd=project, capture_output=True, text=True, timeout=280)
        assert ran.returncode == 0, f"{step}: {ran.stderr[-1500:]}"
    command = json.loads(re.findall(r"^CMD (.*)$", (CONTAINERS / "cpu.Dockerfile").read_text(), flags=re.M)[0])
    ran = subprocess.run([*command, "--quick"], cwd=project, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stdout[-1500:] + ran.stderr[-500:]


def test_both_containers_take_the_readmes_steps():
    said = (ROOT / "README.md").read_text() + (ROOT / "docs/how-to/sglang.md").read_text()
    for step in steps("cpu.Dockerfile")[1:] + steps("gpu.Dockerfile")[1:]:
        assert step.removesuffix(" GPUS=yes") in said, step
    dry = subprocess.run(["make", "-n", "-B", "env", "GPUS=yes"], cwd=ROOT, capture_output=True, text=True, timeout=20)
    assert "--constraint constraints-gpu.txt torch" in dry.stdout


@pytest.mark.parametrize("scheduler", ["slurm", "ray", "kubernetes", "skypilot"])
@pytest.mark.parametrize("bind", ["tcp://0.0.0.0:*", "ipc:///tmp/learner"])
def test_a_bind_without_a_port_that_other_hosts_could_know_is_one_line(tmp_path, scheduler, bind):
    words = ["--on", scheduler, "--config", "launch/recipes/colour_tiny.toml", "--out", str(tmp_path / "out")]
    command = [sys.executable, "launch/cluster.py", "render", *words, "--learner.bind", bind]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    line = f"error: learner.bind = {bind!r}: actors on other hosts must know the port"
    assert refused.returncode == 2 and refused.stderr.startswith(line)
    assert refused.stderr.count("\n") == 1
