"""The resources that a run takes from a Ray cluster, and the commands of its hosts."""

from __future__ import annotations

import shlex

from launch.clusters.host_layout import ClusterLayout
from launch.clusters.ray_hosts import LEAVE_S, HostRole, RayPlan
from launch.processes.children import ROOT
from shared.config.recipe import ConfigError


def plan(made: ClusterLayout, cpus: float) -> RayPlan:
    """Return the plan of the hosts to start. `cpus` is the number of CPUs of each host."""
    cluster, called = made.recipe.cluster, commands(made)
    memory = {"memory": float(cluster.memory_gb * 2**30)} if cluster.memory_gb else {}

    def part(name: str, kind: str, numbers: range, gpus: int, leave_s: float) -> HostRole:
        bundle = {"CPU": cpus, **({"GPU": float(gpus)} if gpus else {}), **memory}
        return HostRole(name, called[kind], tuple(numbers), bundle, leave_s)

    parts = [part("learner", "learner", range(cluster.learner_nodes), made.learner_gpus, made.learner_leave_s)]
    for kind, count, gpus in (("engines", cluster.engine_nodes, made.engine_gpus), ("actors", cluster.actor_nodes, 0)):
        for number in range(count):
            parts.append(part(f"{kind}-{number}", kind, range(number, number + 1), gpus, LEAVE_S))
    return RayPlan(made.job, str(made.folder), cluster.address, cluster.restarts, parts)


def commands(made: ClusterLayout) -> dict[str, str]:
    """Return the shell command by kind of host. A missing environment ends it with code 2, a mistake of the user's."""
    start = f"cd {shlex.quote(str(ROOT))} && . {shlex.quote(made.recipe.cluster.environment)}/bin/activate || exit 2\n"
    head = f"tcp://$PRONK_HEAD:{made.learner_port}"
    return {
        "learner": f"{start}exec {made.learner_command('$PRONK_HEAD')}\n",
        "engines": f"{start}exec {made.engines_command(head, '$PRONK_HOST', 'PRONK_NUMBER')}\n",
        "actors": f"{start}exec {made.actors_command(head)}\n",
    }


def cpus_of_a_host(made: ClusterLayout, nodes: list[dict[str, float]]) -> float:
    """Return the number of CPUs of one host. Raise ConfigError, in one line, if the hosts do not fit on these nodes
    even when all are idle."""
    cluster, left = made.recipe.cluster, [dict(node) for node in nodes if node.get("CPU", 0) >= 1]
    count = cluster.learner_nodes + cluster.engine_nodes + cluster.actor_nodes
    largest = sorted((node["CPU"] for node in left), reverse=True)
    cpus = float(cluster.cpus_per_node or (largest[count - 1] if len(largest) >= count else 0))
    kinds = [made.learner_gpus] * cluster.learner_nodes + [made.engine_gpus] * cluster.engine_nodes
    kinds += [0] * cluster.actor_nodes
    there = ", ".join(f"{node['CPU']:g} CPUs and {node.get('GPU', 0):g} GPUs" for node in left) or "none"
    each = f"{cpus:g} CPUs" if cpus else "a whole node"
    memory = f" and {cluster.memory_gb} GB" if cluster.memory_gb else ""
    actors = f" and {cluster.actor_nodes} x ({each}{memory}) for actors" if cluster.actor_nodes else ""
    short = ConfigError(
        f"the run wants {cluster.learner_nodes} x ({each} and {made.learner_gpus} GPUs{memory}) for its learner and "
        f"{cluster.engine_nodes} x ({each} and {made.engine_gpus} GPUs{memory}) for engines{actors}; "
        f"the cluster's nodes have {there}: start more, or lower what [cluster] asks for"
    )
    taken: list[dict[str, float]] = []
    for number, gpus in enumerate(kinds):
        takes = {"CPU": cpus, "GPU": float(gpus), "memory": float(cluster.memory_gb * 2**30)}
        fits = [node for node in left if all(node.get(name, 0) >= much for name, much in takes.items())]
        if number < cluster.learner_nodes:  # each learner host needs its own node
            fits = [node for node in fits if not any(node is other for other in taken)]
        if not cpus or not fits:
            raise short
        node = min(fits, key=lambda each: (each.get("GPU", 0), each["CPU"]))
        taken.append(node)
        node.update({name: node.get(name, 0) - much for name, much in takes.items()})
    return cpus
