"""GPUs by kind: their memory and what is assumed of their speed; and those that this machine has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from launch.diagnosis.hardware import Gpu, available_bytes
from learner.model.duration import Speed


@dataclass(frozen=True, slots=True)
class Machine:
    """One host's GPUs, all of one kind."""

    kind: str
    gpu_bytes: float  # of one
    speed: Speed
    host_bytes: float  # of one host, for all of its GPUs
    gpus_per_node: int = 8
    assumed: bool = False  # the host's memory is so much for each of its GPUs

    def host_of(self, gpus: int) -> float:
        """Bytes of the host where a task has so many GPUs: of one GPU alone, what is assumed for one."""
        return self.host_bytes / self.gpus_per_node if gpus == 1 and self.assumed else self.host_bytes

    def __str__(self) -> str:
        return f"{self.kind}, {self.gpu_bytes / 1e9:.0f} GB"


KINDS = {  # GB of a GPU, assumed GB of its host for each, published speeds; 400 Gb/s to others but for the first two
    "rtx4090": (24, 64, Speed(tflops=165, gather=15, node=20, net=2.5, wire=10, hbm=1008)),
    "a100": (80, 128, Speed(tflops=312, node=230, net=22, wire=20, hbm=2039)),
    "h100": (80, 256, Speed(tflops=989, hbm=3350)),
    "h200": (141, 256, Speed(tflops=989, hbm=4800)),
    "b200": (180, 384, Speed(tflops=2250, node=700, hbm=7700, host=50)),
}
ASSUMED = "h100"  # where nothing is said and nothing is here


def machine(kind: str, gpu_gb: float = 0, host_gb: float = 0, gpus_per_node: int = 8) -> Machine:
    """`gpu_gb`, `host_gb`: memory of one GPU and of one host, where it is not the kind's."""
    gb, host, speed = KINDS[kind]
    host_bytes = (host_gb or host * gpus_per_node) * 1e9
    return Machine(kind, (gpu_gb or gb) * 1e9, speed, host_bytes, gpus_per_node, assumed=not host_gb)


def machine_of(gpus: Sequence[Gpu], gpus_per_node: int) -> Machine:
    """This machine, from its GPUs (at least one); one of no known kind is taken to be as fast as an H100."""
    name = gpus[0].name.lower().replace(" ", "")
    kind = next((known for known in KINDS if known in name), "")
    gpu_gb, host_gb = min(gpu.num_bytes for gpu in gpus) / 1e9, (available_bytes() or 0) / 1e9
    made = machine(kind or ASSUMED, gpu_gb, host_gb, gpus_per_node)
    return made if kind else replace(made, kind=gpus[0].name)
