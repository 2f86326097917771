"""Ray: a detached supervisor inside the cluster reserves nodes for the run's hosts and watches over them.

All hosts share a file system: the project, the run's folder and the cluster folder have the same paths as here. Each
learner host has a node to itself, and they restart together; all other hosts come and go independently.
"""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from actor.isolation import lifeline
from launch.clusters import ray_hosts
from launch.clusters.host_layout import ClusterLayout, call, make_missing_keys, write
from launch.clusters.ray_plan import commands, cpus_of_a_host, plan
from shared.config.recipe import ConfigError

NAMESPACE = "pronk"
INSTALL = "pip install --group ray, which is ray==2.60.0, into the environment of this command"
CURE = "is a Ray cluster running, of the same version? (ray start --head there, cluster.ray.address here)"
REACH_S = 5.0
ANSWER_S = 60.0
OTHERS_LEAVE_S = 20.0
_COLUMNS = ("part", "number", "address", "state", "since", "restarts")


def render(made: ClusterLayout) -> dict[str, str]:
    """Return the files: name -> text. Raise ConfigError if the recipe sets a time limit, which Ray does not have."""
    cluster = made.recipe.cluster
    made.refuse_hours("Ray")
    cpus = f"{cluster.cpus_per_node} CPUs" if cluster.cpus_per_node else "all CPUs of a node"
    memory = f", {cluster.memory_gb} GB of memory" if cluster.memory_gb else ""
    hosts = {
        "learner": (cluster.learner_nodes, made.learner_gpus, "on nodes of their own, started again together"),
        "engines": (cluster.engine_nodes, made.engine_gpus, "each started again by itself"),
    }
    if cluster.actor_nodes:
        hosts["actors"] = (cluster.actor_nodes, 0, "each started again by itself")
    text = f"The hosts of {made.job} on Ray. The first learner host's address is PRONK_HEAD.\n"
    for part, (count, gpus, how) in hosts.items():
        text += f"\n{part}: {count} x ({cpus}, {gpus} GPUs{memory}), {how}, at most {cluster.restarts} times\n\n"
        text += "".join(f"    {line}\n" for line in commands(made)[part].splitlines())
    return {"hosts.txt": text}


def submit(made: ClusterLayout) -> str:
    files = render(made)
    with _connected(made) as ray:
        if _supervisor(ray, made) is not None:
            raise ConfigError(f"{made.job} runs on this cluster: stop it first (launch/cluster.py stop)")
        cpus = cpus_of_a_host(made, [node["Resources"] for node in ray.nodes() if node["Alive"]])
        make_missing_keys(made.folder)
        write(files, made)
        from launch.clusters import ray_supervisor

        (made.folder / ray_hosts.ENDED).unlink(missing_ok=True)
        for module in (lifeline, ray_hosts, ray_supervisor):  # so that Ray's workers need not have Pronk
            ray.cloudpickle.register_pickle_by_value(module)
        detached = {"name": made.job, "namespace": NAMESPACE, "lifetime": "detached", "max_restarts": -1, "num_cpus": 0}
        actor = ray.remote(ray_supervisor.Supervisor).options(max_task_retries=-1, **detached).remote(plan(made, cpus))
        _answer(ray, actor.status.remote(), "the supervisor")
    return f"{made.job} is on Ray at {made.recipe.cluster.ray.address}; logs in {made.folder / 'logs'}"


def status(made: ClusterLayout) -> str:
    with _connected(made) as ray:
        actor = _supervisor(ray, made)
        rows = actor and _rows(ray, actor.status.remote())
    return _table(rows) if rows else _none(made)


def stop(made: ClusterLayout) -> str:
    """End the run and wait for it: the learner ends its step and writes a checkpoint, then all other hosts end."""
    limit = made.learner_leave_s + OTHERS_LEAVE_S + ANSWER_S
    with _connected(made) as ray:
        actor, deadline = _supervisor(ray, made), time.monotonic() + limit
        if actor is None:
            return _none(made)
        while rows := _rows(ray, actor.stop.remote()):
            if time.monotonic() > deadline:
                ray.kill(actor, no_restart=True)
                left = ", ".join(f"{part} {number} {state}" for part, number, _, state, *_ in rows)
                raise ConfigError(f"{made.job} has not ended in {limit:g} s and was killed; it waited for: {left}")
            time.sleep(1.0)
    return f"{made.job} has ended; logs in {made.folder / 'logs'}"


# Error messages of a head node whose process for this client died at its fork, was late, or died while Ray examined it.
NOT_STARTED = ("Starting Ray client server failed", "Proxy failed to Connect to backend", "psutil.")
TRIES = 3


@contextlib.contextmanager
def _connected(made: ClusterLayout) -> Iterator[Any]:
    """Connect to the cluster. If Ray finds none, it ends the calling process after minutes; so another process tries
    first."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(f"ray is not installed: {INSTALL}")
    import ray

    address = made.recipe.cluster.ray.address
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host:
        try:
            socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
        except (OSError, OverflowError) as error:
            raise ConfigError(f"cluster.ray.address = {address!r} cannot be reached: {error}; {CURE}") from None
    options: dict[str, Any] = {
        "address": address,
        "namespace": NAMESPACE,
        "log_to_driver": False,
        "logging_level": "ERROR",
    }
    trial = (
        f"import ray\ntry: ray.init(**{options!r})\nexcept Exception as error: raise SystemExit(str(error)) from None"
    )
    try:
        _try(lambda: call(sys.executable, "-c", trial, cure=CURE))
        _try(lambda: ray.init(**options))
    except Exception as error:  # noqa: BLE001 - Ray raises exceptions of many kinds
        reason = " ".join(str(error).partition(" failed: ")[2].split())[-300:] or error
        raise ConfigError(f"cluster.ray.address = {address!r}: {reason}; {CURE}") from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _try(reach: Callable[[], object]) -> None:
    """Call `reach`; repeat it if the head node has not started the process for this client, as happens at random."""
    for left in reversed(range(TRIES)):
        try:
            reach()
            return
        except Exception as error:
            if not left or not any(each in str(error) for each in NOT_STARTED):
                raise


def _supervisor(ray: Any, made: ClusterLayout) -> Any:
    """Return the run's supervisor; None if nothing runs under this name."""
    try:
        return ray.get_actor(made.job, namespace=NAMESPACE)
    except ValueError:
        return None


def _answer(ray: Any, reference: Any, whose: str) -> Any:
    try:
        return ray.get(reference, timeout=ANSWER_S)
    except ray.exceptions.GetTimeoutError:
        raise ConfigError(f"{whose} has not answered in {ANSWER_S:g} s: see Ray's own logs on its head node") from None


def _rows(ray: Any, reference: Any) -> list[tuple[str, ...]]:
    """Return the table's rows; empty once the supervisor has ended."""
    try:
        return list(_answer(ray, reference, "the supervisor"))
    except ray.exceptions.RayActorError:
        return []


def _table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(_COLUMNS, *rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (_COLUMNS, *rows)
    )


def _none(made: ClusterLayout) -> str:
    ended = made.folder / ray_hosts.ENDED
    last = f"; the last run: {ended.read_text(encoding='utf-8').strip()}" if ended.exists() else ""
    return f"nothing runs as {made.job} on this cluster{last}; logs in {made.folder / 'logs'}"
