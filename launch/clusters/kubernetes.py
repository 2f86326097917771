"""Kubernetes: an indexed Job for the learner's hosts, one for the engine hosts and one for those with actors alone,
which come and go by themselves.

The pods get the recipe from a ConfigMap and the keys from a Secret, find the learner's first host by a headless
Service, and share one volume, with the runs' folders and the logs.
"""

from __future__ import annotations

from typing import Any

from launch.clusters.layout import Layout, call, make_missing_keys, write
from launch.clusters.manifests import manifest
from launch.task_run.recipe_file import recipe_toml
from shared.config import EXIT_USER_ERROR, ConfigError

CURE = "install kubectl, and let its current context be the cluster's (kubectl config get-contexts)"
FILE = "manifest.yaml"
LABEL, PART = "pronk/run", "pronk/part"


def render(made: Layout) -> dict[str, str]:
    """File name -> text."""
    secret = f"kubectl -n {_namespace(made)} create secret generic {made.job}-keys --from-file=keys"
    comment = f"The hosts of {made.job}. Their keys are not here; submit makes them, as this does:\n{secret}"
    jobs = [_learner(made), _engines(made), *([_actors(made)] if made.recipe.cluster.actor_nodes else [])]
    return {FILE: manifest(_config_map(made), _service(made), *jobs, comment=comment)}


def submit(made: Layout) -> str:
    space, claim = _namespace(made), made.recipe.cluster.kubernetes.claim
    names = call("kubectl", "get", "namespaces", "--output=name", cure=CURE)
    _choose("cluster.kubernetes.namespace", space, names)
    claims = _call(made, "get", "persistentvolumeclaims", "--output=name")
    _choose("cluster.kubernetes.claim", claim, claims)
    if running := _jobs(made):
        raise ConfigError(f"{', '.join(running)} are there already: stop this run first (launch/cluster.py stop)")
    files = render(made)
    keys = make_missing_keys(made.folder)
    write(files, made)
    secret = f"{made.job}-keys"
    _call(made, "delete", "secret", secret, "--ignore-not-found")
    _call(made, "create", "secret", "generic", secret, f"--from-file={keys}")  # their names alone are in `ps`
    _call(made, "label", "secret", secret, f"{LABEL}={made.job}")
    _call(made, "apply", "--filename", str(made.folder / FILE))
    return f"{made.job} is in namespace {space}; logs in {_logs(made)} of the volume {claim}"


def status(made: Layout) -> str:
    said = _call(made, "get", "jobs,pods", f"--selector={LABEL}={made.job}", "--output=wide").rstrip()
    return said or f"no job of {made.job} is in namespace {_namespace(made)}"


def stop(made: Layout) -> str:
    """The learner's pods get the time to end their step and write a checkpoint; they are not waited for."""
    jobs = _jobs(made)
    if not jobs:
        return f"no job of {made.job} is in namespace {_namespace(made)}"
    _call(made, "delete", *jobs, "--wait=false", "--ignore-not-found")
    return f"asked {', '.join(jobs)} to end"


def _namespace(made: Layout) -> str:
    return made.recipe.cluster.kubernetes.namespace


def _logs(made: Layout) -> str:
    return f"{made.seen.runs}/{made.recipe.run.name}.cluster/logs"


def _call(made: Layout, *words: str) -> str:
    return call("kubectl", "--namespace", _namespace(made), *words, cure=CURE)


def _jobs(made: Layout) -> list[str]:
    return _call(made, "get", "jobs", f"--selector={LABEL}={made.job}", "--output=name").split()


def _choose(field: str, name: str, named: str) -> None:
    """`named`: KIND/NAME, a line each. ConfigError if `name` is none of them."""
    known = [each.rpartition("/")[2] for each in named.split()]
    if name not in known:
        raise ConfigError(
            f"{field} = {name!r} is not there; choose one of {', '.join(known) or 'none: create it first'}"
        )


# ------------------------------------------------------------------ manifests


def _meta(made: Layout, name: str, part: str = "") -> dict[str, Any]:
    labels = {LABEL: made.job, **({PART: part} if part else {})}
    return {"name": name, "namespace": _namespace(made), "labels": labels}


def _config_map(made: Layout) -> dict[str, Any]:
    name = made.seen.config.rpartition("/")[2]
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _meta(made, f"{made.job}-recipe"),
        "data": {name: recipe_toml(made.recipe)},
    }


def _service(made: Layout) -> dict[str, Any]:
    """Gives the learner's pods names, which hold while they start, and when they start again elsewhere."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _meta(made, made.job),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {LABEL: made.job, PART: "learner"},
            "ports": [{"name": "learner", "port": made.learner_port}],
        },
    }


def _head(made: Layout) -> str:
    return f"{made.job}-learner-0.{made.job}"


def _address(made: Layout) -> str:
    return f"tcp://{_head(made)}:{made.learner_port}"


def _learner(made: Layout) -> dict[str, Any]:
    pod = _pod(made, "learner", made.learner_command(_head(made)), made.learner_gpus, made.learner_leave_s)
    pod["spec"]["subdomain"] = made.job
    return _job(made, "learner", made.recipe.cluster.learner_nodes, pod)


def _engines(made: Layout) -> dict[str, Any]:
    cluster, called = made.recipe.cluster, made.engines_command(_address(made), "$PRONK_HOST", "JOB_COMPLETION_INDEX")
    pod = _pod(made, "engines", called, made.engine_gpus, leave_s=30, before=made.wait_for_learner(_head(made)))
    if cluster.kubernetes.engine_labels:
        pod["spec"]["nodeSelector"] = dict(cluster.kubernetes.engine_labels)
    return _job(made, "engines", cluster.engine_nodes, pod)


def _actors(made: Layout) -> dict[str, Any]:
    called, before = made.actors_command(_address(made)), made.wait_for_learner(_head(made))
    pod = _pod(made, "actors", called, 0, leave_s=30, before=before)
    return _job(made, "actors", made.recipe.cluster.actor_nodes, pod)


def _job(made: Layout, part: str, hosts: int, pod: dict[str, Any]) -> dict[str, Any]:
    """A pod that fails is started again; a mistake in the recipe ends the job; a lost node does not count."""
    rules = [
        {"action": "FailJob", "onExitCodes": {"containerName": part, "operator": "In", "values": [EXIT_USER_ERROR]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    spec = {
        "completionMode": "Indexed",
        "completions": hosts,
        "parallelism": hosts,
        "backoffLimit": made.recipe.cluster.restarts,
        "podFailurePolicy": {"rules": rules},
        "template": pod,
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _meta(made, f"{made.job}-{part}", part), "spec": spec}


def _pod(made: Layout, part: str, command: str, gpus: int, leave_s: int, before: str = "") -> dict[str, Any]:
    cluster, seen = made.recipe.cluster, made.seen
    logs = _logs(made)
    script = f"""\
. {cluster.environment}/bin/activate || exit {EXIT_USER_ERROR}
mkdir -p {logs} && exec > >(tee -a {logs}/{part}-$JOB_COMPLETION_INDEX.log) 2>&1
{before}exec {command}
"""
    takes = {
        **({"cpu": str(cluster.cpus_per_node)} if cluster.cpus_per_node else {}),
        **({"memory": f"{cluster.memory_gb}Gi"} if cluster.memory_gb else {}),
        **({"nvidia.com/gpu": str(gpus)} if gpus else {}),
    }
    volumes: dict[str, tuple[str, dict[str, Any]]] = {
        "recipe": (seen.config.rpartition("/")[0], {"configMap": {"name": f"{made.job}-recipe"}}),
        "keys": (seen.keys, {"secret": {"secretName": f"{made.job}-keys", "defaultMode": 0o400}}),
        "runs": (seen.runs, {"persistentVolumeClaim": {"claimName": cluster.kubernetes.claim}}),
        "memory": ("/dev/shm", {"emptyDir": {"medium": "Memory"}}),  # NCCL and torch share memory there
    }
    container = {
        "name": part,
        "image": cluster.kubernetes.image,
        "workingDir": seen.project,
        "command": ["bash", "-c", script],
        "env": [{"name": "PRONK_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "resources": {"requests": dict(takes), "limits": takes},
        "volumeMounts": [{"name": name, "mountPath": path} for name, (path, _) in volumes.items()],
    }
    spec = {
        "restartPolicy": "Never",  # the job starts another pod, which may go to another node
        "terminationGracePeriodSeconds": leave_s,
        **({"activeDeadlineSeconds": round(cluster.hours * 3600)} if cluster.hours else {}),  # of one start
        "containers": [container],
        "volumes": [{"name": name, **source} for name, (_, source) in volumes.items()],
        **({"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]} if gpus else {}),
    }
    return {"metadata": {"labels": {LABEL: made.job, PART: part}}, "spec": spec}
