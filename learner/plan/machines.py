"""GPUs by kind: their memory, and assumptions about their speed and their hosts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from learner.plan.duration import Speed


@dataclass(frozen=True, slots=True)
class Machine:
    """One host's GPUs, all of one kind."""

    kind: str
    gpu_bytes: float  # memory of one GPU
    speed: Speed
    host_bytes: float  # memory of one host, for all of its GPUs
    gpus_per_node: int = 8
    assumed: bool = False  # host_bytes is assumed, proportional to the number of GPUs

    def host_of(self, gpus: int) -> float:
        """Return the host's bytes for a task with `gpus` GPUs. For a single GPU, and if the host's memory is assumed,
        that is one GPU's part."""
        return self.host_bytes / self.gpus_per_node if gpus == 1 and self.assumed else self.host_bytes

    def __str__(self) -> str:
        return f"{self.kind}, {self.gpu_bytes / 1e9:.0f} GB"


# GB of a GPU, assumed GB of host memory per GPU, published speeds. Links to other hosts have 400 Gb/s, except for the
# first two kinds.
GPU_KINDS = {
    "rtx4090": (24, 64, Speed(tflops=165, gather=15, node=20, net=2.5, wire=10, hbm=1008)),
    "a100": (80, 128, Speed(tflops=312, node=230, net=22, wire=20, hbm=2039)),
    "h100": (80, 256, Speed(tflops=989, hbm=3350)),
    "h200": (141, 256, Speed(tflops=989, hbm=4800)),
    "b200": (180, 384, Speed(tflops=2250, node=700, hbm=7700, host=50)),
}
ASSUMED_KIND = "h100"  # if no kind is given and no GPU is found


def machine(kind: str, gpu_gb: float = 0, host_gb: float = 0, gpus_per_node: int = 8) -> Machine:
    """Return a machine of a kind. `gpu_gb`, `host_gb`: memory of one GPU and of one host; 0: that of the kind."""
    gb, host_gb_each, speed = GPU_KINDS[kind]
    host_bytes = (host_gb or host_gb_each * gpus_per_node) * 1e9
    return Machine(kind, (gpu_gb or gb) * 1e9, speed, host_bytes, gpus_per_node, assumed=not host_gb)


def machine_like(name: str, gpu_bytes: float, host_bytes: float, gpus_per_node: int) -> Machine:
    """Return a machine with GPUs whose device name is `name`. GPUs of an unknown kind are assumed to be as fast as an
    H100."""
    kind = next((known for known in GPU_KINDS if known in name.lower().replace(" ", "")), "")
    made = machine(kind or ASSUMED_KIND, gpu_bytes / 1e9, host_bytes / 1e9, gpus_per_node)
    return made if kind else replace(made, kind=name)
