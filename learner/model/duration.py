"""Seconds of a step and of a publication, from a model's sizes and what is assumed of the machines."""

from __future__ import annotations

from dataclasses import dataclass

from learner.model.memory import Setting
from learner.model.sizes import ModelSizes

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
    """Forward and backward of all passes, the reference's forward; GPUs are never idle."""
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
    """Shards are gathered as they lie where there are several, then sent, one after the other; of a model with adapters
    what these adapt."""
    changed = float(sizes.parameters)
    if setting.lora_rank:
        changed = float(sum(count * rows * columns for count, rows, columns in sizes.adapted(setting.lora_targets)))
    gathered = setting.weight_bytes * changed if setting.shards > 1 else 0.0
    sent = setting.dtype_bytes * changed
    return PublicationTime(gathered, sent, gathered / (speed.gather * 1e9) + sent / (speed.wire * 1e9))
