"""The [cluster] section of a recipe, which describes a run's hosts; launch/cluster.py reads it."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from shared.config.sections import Section


class SlurmConfig(Section):
    partition: str = Field("", description="empty = the cluster's default one")
    actor_partition: str = Field("", description="of hosts with actors alone, which need no GPU; empty = partition")
    options: tuple[str, ...] = Field((), description='further options of sbatch, such as "--account=NAME"')


class RayConfig(Section):
    address: str = Field(
        "auto",
        pattern=r"^(auto|(ray://)?([A-Za-z0-9_.-]+|\[[0-9a-fA-F:]+\]):[0-9]{1,5})$",
        description="HOST:PORT of the cluster, from one of its nodes; ray://HOST:PORT from outside; auto = this node's",
    )


class KubernetesConfig(Section):
    namespace: str = Field("default", min_length=1, description="of the jobs; it exists already")
    image: str = Field("pronk:latest", min_length=1, description="made by one of launch/clusters/containers")
    claim: str = Field(
        "pronk-runs",
        min_length=1,
        description="PersistentVolumeClaim, ReadWriteMany, for the runs' folders; it exists already",
    )
    engine_labels: dict[str, str] = Field(
        {}, description="labels of the nodes for engines, such as those of spot machines"
    )


class SkyPilotConfig(Section):
    infra: str = Field("", description="cloud[/region[/zone]] or k8s/CONTEXT; empty = the cheapest that SkyPilot finds")
    gpu: str = Field("H100", min_length=1, description="SkyPilot's name of the GPUs, where the recipe asks for cuda")
    spot: bool = Field(False, description="on spot machines, which come and go")
    bucket: str = Field(
        "pronk-runs", min_length=3, description="of the object store, for the runs' folders; made if missing"
    )


class ClusterConfig(Section):
    """Learner hosts hold the learner's ranks, engine hosts the engines. Actors are on the engine hosts and play on the
    engines there; with `actor_nodes` they are on hosts of their own and play on the engines of all hosts."""

    learner_nodes: int = Field(1, gt=0, description="hosts of the learner")
    engine_nodes: int = Field(1, gt=0, description="hosts with engines, and with actors where actor_nodes is 0")
    actor_nodes: int = Field(0, ge=0, description="hosts with actors alone; 0 = actors are on the engine hosts")
    gpus_per_node: int = Field(8, gt=0, description="GPUs of a host, where learner.device or engine.device is cuda")
    ranks_per_node: int = Field(1, gt=0, description="the learner's ranks on a host without GPUs; else one a GPU")
    cpus_per_node: int = Field(0, ge=0, description="cores that a host gives; 0 = all of it, alone")
    memory_gb: int = Field(0, ge=0, description="memory that a host gives; 0 = all, or the cluster's own rule")
    hours: float = Field(0.0, ge=0, description="time limit of one start of a job; 0 = the cluster's own")
    restarts: int = Field(100, ge=0, description="times that a job is started again after a failure or a lost host")
    environment: str = Field(".venv", description="Python environment of the hosts, from the project's folder or /")
    address: str = Field("hostname", description="shell command that prints a host's address in the hosts' network")
    rendezvous_port: int = Field(29500, gt=0, lt=65536, description="where the learner's hosts meet, on its first one")
    slurm: SlurmConfig = SlurmConfig()
    ray: RayConfig = RayConfig()
    kubernetes: KubernetesConfig = KubernetesConfig()
    skypilot: SkyPilotConfig = SkyPilotConfig()

    @model_validator(mode="after")
    def _is_one_line(self) -> Self:
        for option in (self.address, self.environment, *self.slurm.options):
            if "\n" in option:
                raise ValueError(f"[cluster]: {option!r} is more than one line; it is written into a script as one")
        for option in self.slurm.options:
            if not option.startswith("-"):
                raise ValueError(f'cluster.slurm.options: {option!r} is no option; write it as "--name=value"')
        return self
