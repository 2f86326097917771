"""Seconds of a step, its generation and a publication, from a model's sizes and what is assumed of the machines."""

from __future__ import annotations

from dataclasses import dataclass, replace

from learner.model.memory import Setting, memory
from learner.model.sizes import ModelSizes

FLOAT32_TAKES = "in float32 matrix products take about 14 times as long on an H100"
SUM_S = 2e-5  # of one sum over an engine's GPUs, assumed, besides the bytes
BESIDE_CACHE = 3e9  # bytes that an engine needs besides weights and cache, assumed: context, graphs, images, arrivals
LEAST_EPISODES = 2  # of full length that an engine has to have room for
IMAGE_PATCHES = 1024  # of one image, assumed: 512 x 512 pixels


@dataclass(frozen=True, slots=True)
class Speed:
    """What is assumed; none of it is measured here."""

    tflops: float = 989.0  # a second, of one GPU at most: an H100 or H200 in bfloat16
    mfu: float = 0.3  # the share of it that a step makes use of
    gather: float = 100.0  # GB a second, of shards to whole parameters
    node: float = 350.0  # GB a second that a GPU receives from those of its node
    net: float = 45.0  # and from those of others: nine tenths of a link of 400 Gb/s
    wire: float = 40.0  # GB a second, from rank 0 to all engines: four fifths of a link of 400 Gb/s
    hbm: float = 3350.0  # GB a second that a GPU reads of its own memory at most: an H100
    decode: float = 0.4  # the share of it that engines make use of, their pauses between tokens included
    host: float = 25.0  # GB a second between a GPU and its host: PCI Express 4.0


@dataclass(frozen=True, slots=True)
class StepTime:
    flops: float  # of all GPUs
    seconds: float


@dataclass(frozen=True, slots=True)
class PublicationTime:
    gathered: float  # bytes
    sent: float
    seconds: float


def step_time(sizes: ModelSizes, setting: Setting, speed: Speed) -> StepTime:
    """Forward and backward of all passes, the reference's forward; GPUs are never idle. At the speed of bfloat16,
    whatever the dtype."""
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
    """Shards are gathered in the dtype that is sent where there are several, then sent, one after the other; of a model
    with adapters what these adapt, or they alone. Engines take their time to merge these."""
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
    """What generation depends on, besides the model."""

    count: int
    tensor_parallel: int  # GPUs of one engine
    gpu_bytes: float
    mem_fraction: float  # of a GPU, for weights, keys and values
    max_batch: int  # requests that an engine computes at once
    dtype_bytes: int = 2  # of weights, keys and values
    reserved: float = 0.0  # bytes of `mem_fraction` for other things, where the rest of the GPU is somebody else's

    @staticmethod
    def sharing(gpu_bytes: float, mem_fraction: float, max_batch: int, dtype_bytes: int) -> Engines:
        """One that has `mem_fraction` of a GPU for all that it needs."""
        return Engines(1, 1, gpu_bytes, mem_fraction, max_batch, dtype_bytes, reserved=BESIDE_CACHE)

    def token_bytes(self, sizes: ModelSizes) -> int:
        """Keys and values of one token on all GPUs of an engine; heads are held twice where GPUs are more than they."""
        heads = max(sizes.num_kv_heads, self.tensor_parallel)
        return 2 * sizes.num_layers * heads * sizes.head_dim * self.dtype_bytes

    def cache_tokens(self, sizes: ModelSizes) -> int:
        """Tokens whose keys and values one engine has room for; not above 0 where its weights alone have none."""
        room = self.mem_fraction * self.gpu_bytes * self.tensor_parallel - self.reserved
        room -= self.dtype_bytes * sizes.parameters
        return int(room // self.token_bytes(sizes))

    def batch(self, sizes: ModelSizes, episode_tokens: int, playing: int) -> int:
        """Episodes of one engine that advance at once; `playing` are in play at all engines."""
        return max(1, min(self.max_batch, self.cache_tokens(sizes) // episode_tokens, -(-playing // self.count)))


def generation_time(
    sizes: ModelSizes, setting: Setting, engines: Engines, playing: int, sampled: int, speed: Speed
) -> float:
    """Seconds in which the engines play a step's episodes, of `sampled` tokens each. A token costs a reading of the
    weights (of experts, those that a batch is expected to need) and of its episodes' keys and values; what was not
    sampled is computed once."""
    batch = engines.batch(sizes, setting.episode_tokens, playing)
    needed = 1 - (1 - sizes.experts_per_token / sizes.num_experts) ** batch if sizes.num_experts else 1.0
    weights = sizes.text_parameters - (0 if sizes.tied else sizes.head_parameters)  # of embeddings, a row a token
    weights -= round(sizes.expert_parameters * (1 - needed))
    read = engines.dtype_bytes * weights + batch * setting.episode_tokens * engines.token_bytes(sizes)
    forwards = setting.episodes * sampled / (engines.count * batch)
    decoding = forwards * read / (engines.tensor_parallel * speed.hbm * 1e9 * speed.decode)
    if engines.tensor_parallel > 1:  # two sums a layer, each there and back
        summed = 2 * batch * sizes.hidden_size * engines.dtype_bytes / (speed.node * 1e9)
        decoding += forwards * 2 * sizes.num_layers * (SUM_S + summed)
    prompt = max(0, setting.episode_tokens - sampled)
    patches = int(setting.episode_tokens * setting.visual_share * sizes.merge)
    images = [IMAGE_PATCHES] * (patches // IMAGE_PATCHES) + [patches % IMAGE_PATCHES]
    flops = setting.episodes * sizes.forward_flops([prompt], images, 0)
    return decoding + flops / (engines.count * engines.tensor_parallel * speed.tflops * 1e12 * speed.mfu)


def offload_time(sizes: ModelSizes, setting: Setting, speed: Speed) -> float:
    """Seconds of one microbatch in which shards that rest in the host's memory travel: to the GPU for the forward and
    for the backward, the gradients of those that are trained back."""
    if not setting.offload:
        return 0.0
    kept = memory(sizes, replace(setting, offload=False))
    return (2 * kept.weights + kept.gradients) / (speed.host * 1e9)
