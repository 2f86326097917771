"""Seconds of a step, its generation and a publication, from a model's sizes and assumptions about the machines."""

from __future__ import annotations

from dataclasses import dataclass, replace

from learner.plan.memory_use import Setting, memory
from shared.families.model_sizes import ModelSizes

FLOAT32_TAKES = "in float32 matrix products take about 14 times as long on an H100"
SUM_S = 2e-5  # seconds of one sum over an engine's GPUs, besides the bytes' time; assumed
BESIDE_CACHE = 3e9  # assumed bytes of an engine besides weights and cache: context, graphs, images, arriving weights
LEAST_EPISODES = 2  # full-length episodes for which an engine must have room
IMAGE_PATCHES = 1024  # patches of one image, assumed: 512 x 512 pixels


@dataclass(frozen=True, slots=True)
class Speed:
    """Assumed speeds of a machine; none of them is measured here."""

    tflops: float = 989.0  # peak of one GPU: an H100 or H200 in bfloat16
    mfu: float = 0.3  # share of the peak that a step reaches
    gather: float = 100.0  # GB per second for gathering shards into whole parameters
    node: float = 350.0  # GB per second that a GPU receives from GPUs of its node
    net: float = 45.0  # GB per second from GPUs of other nodes: nine tenths of a 400 Gb/s link
    wire: float = 40.0  # GB per second from rank 0 to all engines: four fifths of a 400 Gb/s link
    hbm: float = 3350.0  # GB per second, the peak at which a GPU reads its own memory: an H100
    decode: float = 0.4  # share of that peak that engines reach, including their pauses between tokens
    host: float = 25.0  # GB per second between a GPU and its host: PCI Express 4.0


@dataclass(frozen=True, slots=True)
class StepTime:
    flops: float  # sum over all GPUs
    seconds: float


@dataclass(frozen=True, slots=True)
class PublicationTime:
    gathered: float  # bytes
    sent: float
    seconds: float


def step_time(sizes: ModelSizes, setting: Setting, speed: Speed) -> StepTime:
    """Return the time of a step: forward and backward of all passes, and the reference's forward, with GPUs never idle.

    It is computed with the speed of bfloat16, whatever the dtype.
    """
    tokens = setting.episode_tokens
    patches = tokens * setting.visual_share * sizes.merge
    images = [IMAGE_PATCHES] * int(patches // IMAGE_PATCHES) + [int(patches % IMAGE_PATCHES)]
    forward = sizes.forward_flops([tokens], images, int(tokens * setting.sampled_share))
    backward = 1 if setting.lora_rank else 2  # frozen weights have no gradient
    again = 1 if setting.activation_checkpointing else 0
    forwards = setting.passes * (1 + backward + again) + (1 if setting.reference else 0)
    flops = setting.episodes * forwards * forward
    return StepTime(flops, flops / (setting.gpus * speed.tflops * 1e12 * speed.mfu))


def publication_time(sizes: ModelSizes, setting: Setting, speed: Speed) -> PublicationTime:
    """Return the time of a publication: shards are gathered in the dtype that is sent, if there are several, then sent.

    With adapters, only the adapted weights or only the adapters are sent. The engines' time to merge adapters is not
    included.
    """
    changed = float(sizes.parameters)
    if setting.lora_rank and setting.lora_publish == "adapter":
        changed = float(sizes.adapter_parameters(setting.lora_rank, setting.lora_targets))
    elif setting.lora_rank:
        changed = float(sum(count * rows * columns for count, rows, columns in sizes.adapted(setting.lora_targets)))
    sent = setting.dtype_bytes * changed
    gathered = sent if setting.shards > 1 else 0.0
    return PublicationTime(gathered, sent, gathered / (speed.gather * 1e9) + sent / (speed.wire * 1e9))


@dataclass(frozen=True, slots=True)
class Engines:
    """The engines' properties on which generation depends, besides the model."""

    count: int
    tensor_parallel: int  # GPUs of one engine
    gpu_bytes: float
    mem_fraction: float  # share of a GPU for weights, keys and values
    max_batch: int  # requests that an engine computes at once
    dtype_bytes: int = 2  # per value of weights, keys and values
    # bytes of `mem_fraction` for other purposes, if the rest of the GPU belongs to another process
    reserved: float = 0.0

    @staticmethod
    def sharing(gpu_bytes: float, mem_fraction: float, max_batch: int, dtype_bytes: int) -> Engines:
        """Return one engine for which `mem_fraction` of a GPU must cover all its needs."""
        return Engines(1, 1, gpu_bytes, mem_fraction, max_batch, dtype_bytes, reserved=BESIDE_CACHE)

    def token_bytes(self, sizes: ModelSizes) -> int:
        """Return the bytes of one token's keys and values on all GPUs of an engine. With more GPUs than heads, heads
        are held more than once."""
        heads = max(sizes.num_kv_heads, self.tensor_parallel)
        return 2 * sizes.num_attention_layers * heads * sizes.head_dim * self.dtype_bytes

    def cache_tokens(self, sizes: ModelSizes) -> int:
        """Return the number of tokens whose keys and values fit into one engine; 0 or less if its weights alone do not
        fit."""
        return int(self._room(sizes) // self.token_bytes(sizes))

    def _room(self, sizes: ModelSizes) -> float:
        """Return the bytes of one engine beside its weights."""
        room = self.mem_fraction * self.gpu_bytes * self.tensor_parallel - self.reserved
        return room - self.dtype_bytes * sizes.parameters

    def batch(self, sizes: ModelSizes, episode_tokens: int, playing: int) -> int:
        """Return the number of episodes that one engine advances at once; `playing` are in play on all engines."""
        each = episode_tokens * self.token_bytes(sizes) + sizes.state_bytes(self.dtype_bytes)
        return max(1, min(self.max_batch, int(self._room(sizes) // each), -(-playing // self.count)))


def generation_time(
    sizes: ModelSizes, setting: Setting, engines: Engines, playing: int, sampled: int, speed: Speed
) -> float:
    """Return the seconds in which the engines play a step's episodes, with `sampled` tokens each.

    Each token costs one read of the weights (of the experts, those that a batch is expected to need) and of its
    episodes' keys and values; states of delta nets are read and written. Tokens that were not sampled are computed
    once.
    """
    batch = engines.batch(sizes, setting.episode_tokens, playing)
    needed = 1 - (1 - sizes.experts_per_token / sizes.num_experts) ** batch if sizes.num_experts else 1.0
    # only one row per token is read of the embeddings
    weights = sizes.text_parameters - (0 if sizes.tied else sizes.head_parameters)
    weights -= round(sizes.expert_parameters * (1 - needed))
    read = engines.dtype_bytes * weights + batch * setting.episode_tokens * engines.token_bytes(sizes)
    read += 2 * batch * sizes.state_bytes(engines.dtype_bytes)
    forwards = setting.episodes * sampled / (engines.count * batch)
    decoding = forwards * read / (engines.tensor_parallel * speed.hbm * 1e9 * speed.decode)
    if engines.tensor_parallel > 1:  # two sums per layer, each sent in two directions
        summed = 2 * batch * sizes.hidden_size * engines.dtype_bytes / (speed.node * 1e9)
        decoding += forwards * 2 * sizes.num_layers * (SUM_S + summed)
    prompt = max(0, setting.episode_tokens - sampled)
    patches = int(setting.episode_tokens * setting.visual_share * sizes.merge)
    images = [IMAGE_PATCHES] * (patches // IMAGE_PATCHES) + [patches % IMAGE_PATCHES]
    flops = setting.episodes * sizes.forward_flops([prompt], images, 0)
    return decoding + flops / (engines.count * engines.tensor_parallel * speed.tflops * 1e12 * speed.mfu)


def offload_time(sizes: ModelSizes, setting: Setting, speed: Speed) -> float:
    """Return the seconds of transfers for one microbatch, if shards are kept in the host's memory.

    Shards go to the GPU for the forward and for the backward; gradients of trained parameters come back.
    """
    if not setting.offload:
        return 0.0
    kept = memory(sizes, replace(setting, offload=False))
    return (2 * kept.weights + kept.gradients) / (speed.host * 1e9)
