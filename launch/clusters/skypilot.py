"""SkyPilot: one managed job over all hosts of the run: first the learner's, then those with engines, then those with
actors.

SkyPilot finds the machines, copies the project to them and installs it. When it loses a machine, it starts all of them
again, and the learner continues from its last checkpoint in the bucket.
"""

from __future__ import annotations

import base64
import io
import os
import tarfile
from pathlib import Path
from typing import Any

from launch.clusters.host_layout import ClusterLayout, call, make_missing_keys, write
from launch.clusters.manifests import manifest
from launch.engines.kinds.engine_kind import engine_kind
from launch.processes.children import ROOT
from shared.config.recipe import ConfigError

CURE = "pip install skypilot into an environment on the PATH, then sky check"
FILE, SECRETS, SECRET = "task.yaml", "secrets.env", "PRONK_KEYS"
NOT_ENDED = ("PENDING", "STARTING", "RUNNING", "RECOVERING", "CANCELLING")


def render(made: ClusterLayout) -> dict[str, str]:
    """Return the files: name -> text. Raise ConfigError if the recipe sets a time limit, which SkyPilot does not
    have."""
    cluster = made.recipe.cluster
    made.refuse_hours("SkyPilot")
    task: dict[str, Any] = {
        "name": made.job,
        "num_nodes": cluster.learner_nodes + cluster.engine_nodes + cluster.actor_nodes,
        "resources": _resources(made),
        "workdir": str(ROOT),
        "file_mounts": {
            made.paths.config: str(made.folder / "recipe.toml"),
            made.paths.runs: {"name": cluster.skypilot.bucket, "mode": "MOUNT_CACHED"},
        },
        "secrets": {SECRET: None},
        "setup": _setup(made),
        "run": _run(made),
    }
    comment = f"The hosts of {made.job}; submit makes the keys, and hands them over by: --secret-file {SECRETS}"
    if cluster.actor_nodes and "accelerators" in task["resources"]:
        comment += "\nThe hosts of a job are all alike: those with actors alone have GPUs too, and cost as much."
    return {FILE: manifest(task, comment=comment)}


def submit(made: ClusterLayout) -> str:
    if any(state in line for line in _lines(made) for state in NOT_ENDED):
        raise ConfigError(f"{made.job} is in SkyPilot's queue: stop it first (launch/cluster.py stop)")
    files = render(made)
    keys = make_missing_keys(made.folder)
    write(files, made)
    secrets = made.folder / SECRETS
    with os.fdopen(os.open(secrets, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(f"{SECRET}={_packed(keys)}\n")
    task = str(made.folder / FILE)
    call("sky", "jobs", "launch", "--yes", "--async", "--secret-file", str(secrets), task, cure=CURE)
    return f"{made.job} is with SkyPilot: sky jobs queue shows it, sky jobs logs --name {made.job} what it prints"


def status(made: ClusterLayout) -> str:
    return "\n".join(_lines(made)) or f"no job {made.job} is in SkyPilot's queue"


def stop(made: ClusterLayout) -> str:
    """Cancel the run's job. SkyPilot removes the machines at once: the run can later continue from its last regular
    checkpoint."""
    if not _lines(made):
        return f"no job {made.job} is in SkyPilot's queue"
    call("sky", "jobs", "cancel", "--yes", "--name", made.job, cure=CURE)
    return f"asked {made.job} to end"


def _lines(made: ClusterLayout) -> list[str]:
    queue = call("sky", "jobs", "queue", cure=CURE).splitlines()
    return [line for line in queue if made.job in line.split()]


def _packed(keys: Path) -> str:
    """Return all key files as one word."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for path in sorted(keys.iterdir()):
            archive.add(path, path.name)
    return base64.b64encode(packed.getvalue()).decode()


def _resources(made: ClusterLayout) -> dict[str, Any]:
    cluster, sky = made.recipe.cluster, made.recipe.cluster.skypilot
    gpus = max(made.learner_gpus, made.engine_gpus)
    return {
        **({"infra": sky.infra} if sky.infra else {}),
        **({"accelerators": f"{sky.gpu}:{gpus}"} if gpus else {}),
        **({"cpus": f"{cluster.cpus_per_node}+"} if cluster.cpus_per_node else {}),
        **({"memory": f"{cluster.memory_gb}+"} if cluster.memory_gb else {}),
        **({"use_spot": True} if sky.spot else {}),
    }


def _setup(made: ClusterLayout) -> str:
    """Return the installation steps of the README, with a Python that is new enough: 3.12 on Ubuntu 24.04, 3.11 on
    22.04."""
    engine = f"{command}\n" if (command := engine_kind(made.recipe.engine.kind).setup_command) else ""
    return (
        f"set -e\nsudo ln -sfn ~/sky_workdir {made.paths.project}\ncd {made.paths.project}\n"
        f'sudo install -d -m 700 -o "$(id -un)" {made.paths.keys}\n'
        "sudo apt-get update -qq\n"
        "sudo apt-get install -qq -y make python3.12-venv || sudo apt-get install -qq -y make python3.11-venv\n"
        f"export PYTHON=$(command -v python3.12 || command -v python3.11)\nmake env\n{engine}"
    )


def _run(made: ClusterLayout) -> str:
    cluster = made.recipe.cluster
    address = f"tcp://$head:{made.learner_port}"
    engines, actors = made.engines_command(address, "$host", "number"), made.actors_command(address)
    return f"""\
set -uo pipefail
cd {made.paths.project}
. {cluster.environment}/bin/activate
(umask 077 && mkdir -p {made.paths.keys}) || exit 2
echo "${SECRET}" | base64 -d | tar -xzC {made.paths.keys}
unset {SECRET}
mapfile -t hosts <<< "$SKYPILOT_NODE_IPS"
head=${{hosts[0]}} host=${{hosts[$SKYPILOT_NODE_RANK]}} number=$((SKYPILOT_NODE_RANK - {cluster.learner_nodes}))

learner() {{
  {made.learner_command("$head")}
}}
engines() (
{made.wait_for_learner("$head")}{engines}
)
actors() (
{made.wait_for_learner("$head")}{actors}
)

# A mistake in the recipe (code 2) stays one; anything else is tried again, the learner from its last checkpoint.
for ((start = 0; start <= {cluster.restarts}; start++)); do
  if ((number < 0)); then learner; elif ((number < {cluster.engine_nodes})); then engines; else actors; fi
  code=$?
  ((code == 0 || code == 2)) && break
  sleep 5
done
exit "$code"
"""
