"""Kubernetes: an indexed Job for the learner's hosts, one for the engine hosts and one for hosts with only actors;
engine and actor hosts may come and go independently.

The pods get the recipe from a ConfigMap and the keys from a Secret, find the learner's first host through a headless
Service, and share one volume for the runs' folders and the logs.
"""

from __future__ import annotations

from typing import Any

from launch.clusters.host_layout import ClusterLayout, call, make_missing_keys, write
from launch.clusters.manifests import manifest
from launch.recipe_fields import recipe_toml
from shared.config.recipe import EXIT_USER_ERROR, ConfigError

CURE = "install kubectl, and let its current context be the cluster's (kubectl config get-contexts)"
FILE = "manifest.yaml"
LABEL, PART = "pronk/run", "pronk/part"


def render(made: ClusterLayout) -> dict[str, str]:
    """Return the manifests: file name -> text."""
    secret = f"kubectl -n {_namespace(made)} create secret generic {made.job}-keys --from-file=keys"
    comment = f"The hosts of {made.job}. Their keys are not here; submit makes them, as this does:\n{secret}"
    jobs = [_learner(made), _engines(made), *([_actors(made)] if made.recipe.cluster.actor_nodes else [])]
    return {FILE: manifest(_config_map(made), _service(made), *jobs, comment=comment)}


def submit(made: ClusterLayout) -> str:
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
    _call(made, "create", "secret", "generic", secret, f"--from-file={keys}")  # `ps` shows only file names
    _call(made, "label", "secret", secret, f"{LABEL}={made.job}")
    _call(made, "apply", "--filename", str(made.folder / FILE))
    return f"{made.job} is in namespace {space}; logs in {_logs(made)} of the volume {claim}"


def status(made: ClusterLayout) -> str:
    output = _call(made, "get", "jobs,pods", f"--selector={LABEL}={made.job}", "--output=wide").rstrip()
    return output or f"no job of {made.job} is in namespace {_namespace(made)}"


def stop(made: ClusterLayout) -> str:
    """Delete the run's jobs. The learner's pods get time to end their step and write a checkpoint; this call does not
    wait for them."""
    jobs = _jobs(made)
    if not jobs:
        return f"no job of {made.job} is in namespace {_namespace(made)}"
    _call(made, "delete", *jobs, "--wait=false", "--ignore-not-found")
    return f"asked {', '.join(jobs)} to end"


def _namespace(made: ClusterLayout) -> str:
    return made.recipe.cluster.kubernetes.namespace


def _logs(made: ClusterLayout) -> str:
    return f"{made.paths.runs}/{made.recipe.run.name}.cluster/logs"


def _call(made: ClusterLayout, *words: str) -> str:
    return call("kubectl", "--namespace", _namespace(made), *words, cure=CURE)


def _jobs(made: ClusterLayout) -> list[str]:
    return _call(made, "get", "jobs", f"--selector={LABEL}={made.job}", "--output=name").split()


def _choose(field: str, name: str, named: str) -> None:
    """Raise ConfigError unless `name` is in the list `named` (one KIND/NAME per line)."""
    known = [each.rpartition("/")[2] for each in named.split()]
    if name not in known:
        raise ConfigError(
            f"{field} = {name!r} is not there; choose one of {', '.join(known) or 'none: create it first'}"
        )


# ------------------------------------------------------------------ manifests


def _meta(made: ClusterLayout, name: str, part: str = "") -> dict[str, Any]:
    labels = {LABEL: made.job, **({PART: part} if part else {})}
    return {"name": name, "namespace": _namespace(made), "labels": labels}


def _config_map(made: ClusterLayout) -> dict[str, Any]:
    name = made.paths.config.rpartition("/")[2]
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _meta(made, f"{made.job}-recipe"),
        "data": {name: recipe_toml(made.recipe)},
    }


def _service(made: ClusterLayout) -> dict[str, Any]:
    """Return the headless service that gives the learner's pods host names, which are valid also while a pod starts,
    and after it moves to another node."""
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


def _head(made: ClusterLayout) -> str:
    return f"{made.job}-learner-0.{made.job}"


def _address(made: ClusterLayout) -> str:
    return f"tcp://{_head(made)}:{made.learner_port}"


def _learner(made: ClusterLayout) -> dict[str, Any]:
    pod = _pod(made, "learner", made.learner_command(_head(made)), made.learner_gpus, made.learner_leave_s)
    pod["spec"]["subdomain"] = made.job
    return _job(made, "learner", made.recipe.cluster.learner_nodes, pod)


def _engines(made: ClusterLayout) -> dict[str, Any]:
    cluster, called = made.recipe.cluster, made.engines_command(_address(made), "$PRONK_HOST", "JOB_COMPLETION_INDEX")
    pod = _pod(made, "engines", called, made.engine_gpus, leave_s=30, before=made.wait_for_learner(_head(made)))
    if cluster.kubernetes.engine_labels:
        pod["spec"]["nodeSelector"] = dict(cluster.kubernetes.engine_labels)
    return _job(made, "engines", cluster.engine_nodes, pod)


def _actors(made: ClusterLayout) -> dict[str, Any]:
    called, before = made.actors_command(_address(made)), made.wait_for_learner(_head(made))
    pod = _pod(made, "actors", called, 0, leave_s=30, before=before)
    return _job(made, "actors", made.recipe.cluster.actor_nodes, pod)


def _job(made: ClusterLayout, part: str, hosts: int, pod: dict[str, Any]) -> dict[str, Any]:
    """Return a job. A failed pod is started again, up to `cluster.restarts` times; a pod on a lost node does not count;
    a mistake in the recipe ends the job."""
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


def _pod(made: ClusterLayout, part: str, command: str, gpus: int, leave_s: int, before: str = "") -> dict[str, Any]:
    cluster, paths = made.recipe.cluster, made.paths
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
        "recipe": (paths.config.rpartition("/")[0], {"configMap": {"name": f"{made.job}-recipe"}}),
        "keys": (paths.keys, {"secret": {"secretName": f"{made.job}-keys", "defaultMode": 0o400}}),
        "runs": (paths.runs, {"persistentVolumeClaim": {"claimName": cluster.kubernetes.claim}}),
        "memory": ("/dev/shm", {"emptyDir": {"medium": "Memory"}}),  # NCCL and torch share memory there
    }
    container = {
        "name": part,
        "image": cluster.kubernetes.image,
        "workingDir": paths.project,
        "command": ["bash", "-c", script],
        "env": [{"name": "PRONK_HOST", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "resources": {"requests": dict(takes), "limits": takes},
        "volumeMounts": [{"name": name, "mountPath": path} for name, (path, _) in volumes.items()],
    }
    spec = {
        "restartPolicy": "Never",  # the job starts a new pod instead, perhaps on another node
        "terminationGracePeriodSeconds": leave_s,
        **({"activeDeadlineSeconds": round(cluster.hours * 3600)} if cluster.hours else {}),  # limit of one start
        "containers": [container],
        "volumes": [{"name": name, **source} for name, (_, source) in volumes.items()],
        **({"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]} if gpus else {}),
    }
    return {"metadata": {"labels": {LABEL: made.job, PART: part}}, "spec": spec}
