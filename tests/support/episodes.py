"""Random episodes for tests of the learner: real PNG images, several turns, behaviour logprobs as needed; and the
learner's settings by the last parts of their names."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from PIL import Image as PILImage

from learner.batch.episodes import make_episode
from learner.batch.image_decoder import ImageDecoder
from learner.batch.microbatch import Microbatch
from learner.batch.packer import pack
from learner.model.policy import Policy
from shared.config.learner_section import LearnerConfig
from shared.config.objective_section import ObjectiveConfig
from shared.config.recipe import known_fields
from shared.types import Ending, Group, Image, Trajectory, Turn
from shared.vision import VisionSpec
from shared.wire.frames import DTYPES
from tests.support.tiny import draw_image, logprobs_under, png


def learner_config(**values: Any) -> LearnerConfig:
    """Return a learner section with these fields, each given by the last part of its dotted name; `objective` and
    `optimizer` give their `name`."""
    fields: dict[str, Any] = {}
    keys = known_fields(LearnerConfig)
    for name, value in values.items():
        in_sections = [key for key in keys if key.endswith(f".{name}")]
        key = f"{name}.name" if f"{name}.name" in keys else in_sections[0] if len(in_sections) == 1 else name
        section, *inner = key.split(".")
        if inner:
            fields.setdefault(section, {})[inner[0]] = value
        else:
            fields[section] = value
    return LearnerConfig(**{"group_size": 1 if values.get("objective", "vtrace") in ("vtrace", "ppo") else 2} | fields)


def random_trajectory(
    spec: VisionSpec,
    seed: int,
    *,
    turns: int = 3,
    turn_tokens: tuple[int, int] = (3, 8),
    prompt_tokens: int = 5,
    vocab_size: int = 300,
    sides: tuple[int, ...] = (64, 96),
    with_images: bool = True,
    version: int = 0,
) -> Trajectory:
    """Return an episode with a prompt, then per turn an image, some text and some sampled tokens; behaviour logprobs
    are about -3."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(1, vocab_size, prompt_tokens).tolist()
    mask, images, spans = [0] * prompt_tokens, [], []
    for turn in range(turns):
        observation = rng.integers(1, vocab_size, 4).tolist()
        if with_images and spec.takes_images:
            width, height = rng.choice(sides, 2)
            images.append(Image.of(png(draw_image(int(width), int(height), seed * 100 + turn))))
            observation.insert(1, spec.image_token_id)
        written = rng.integers(1, vocab_size, rng.integers(*turn_tokens)).tolist()
        start = len(ids) + len(observation)
        spans.append(Turn(start, start + len(written), float(rng.normal())))
        ids += observation + written
        mask += [0] * len(observation) + [1] * len(written)
    loss_mask = np.array(mask, dtype=np.uint8)
    logprobs = np.where(loss_mask, -3 + 0.1 * rng.normal(size=len(ids)), 0).astype(np.float32)
    return Trajectory(
        token_ids=np.array(ids, dtype=np.int32),
        loss_mask=loss_mask,
        behaviour_logprobs=logprobs,
        policy_versions=np.where(loss_mask, version, -1).astype(np.int32),
        turns=tuple(spans),
        reward=float(sum(turn.reward for turn in spans)),
        images=tuple(images),
        ending=Ending.COMPLETED,
    )


def joined(parts: Sequence[Trajectory]) -> Trajectory:
    """Return one episode whose segments are these episodes."""
    starts = np.cumsum([0, *(len(part.token_ids) for part in parts)]).tolist()
    turns = tuple(
        Turn(turn.start + start, turn.end + start, turn.reward)
        for part, start in zip(parts, starts, strict=False)
        for turn in part.turns
    )
    return replace(
        parts[0],
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in DTYPES},
        turns=turns,
        images=tuple(image for part in parts for image in part.images),
        reward=sum(part.reward for part in parts),
        segments=tuple(starts[1:-1]),
    )


def random_groups(spec: VisionSpec, num_groups: int, *, group_size: int = 1, seed: int = 0, **kwargs) -> list[Group]:
    groups = []
    for g in range(num_groups):
        seeds = range((seed + g) * 1000, (seed + g) * 1000 + group_size)
        groups.append(Group(f"g{seed + g}", "tester", tuple(random_trajectory(spec, s, **kwargs) for s in seeds)))
    return groups


def siblings(spec: VisionSpec, count: int, *, seed: int = 0, **kwargs: Any) -> Group:
    """Return a group like a played one: all episodes begin with the same prompt and image, and continue differently,
    with different lengths."""
    first, *others = (random_trajectory(spec, 1000 * seed + i, **kwargs) for i in range(count))
    prompt = int(np.flatnonzero(first.loss_mask)[0])
    same = [first]
    for trajectory in others:
        ids = np.concatenate([first.token_ids[:prompt], trajectory.token_ids[prompt:]])
        same.append(replace(trajectory, token_ids=ids, images=(*first.images[:1], *trajectory.images[1:])))
    return Group(f"s{seed}", "tester", tuple(same))


def packed(policy: Policy, trajectories: Sequence[Trajectory]) -> Microbatch:
    decoder = ImageDecoder(policy.spec)
    episodes = [make_episode(t, 0.0, decoder, ObjectiveConfig()) for t in trajectories]
    return pack(episodes, decoder, torch.device("cpu"))


@torch.no_grad()
def gap(policy: Policy, trajectory: Trajectory, temperature: float = 1.0) -> float:
    """Return the largest difference between the behaviour logprobs and the policy's logprobs of the same tokens."""
    batch = packed(policy, [trajectory])
    return float((policy(batch, temperature).logprobs - batch.behaviour_logprobs).abs().max())


def plain_logprobs(model: Any, trajectory: Trajectory, spec: VisionSpec, temperature: float = 1.0) -> torch.Tensor:
    """Return the logprobs of the sampled tokens from one forward of transformers, with the vision ids banned."""
    images = [PILImage.open(io.BytesIO(image.data)).convert("RGB") for image in trajectory.images]
    ids, sampled = trajectory.token_ids.tolist(), np.flatnonzero(trajectory.loss_mask)
    return logprobs_under(model, spec, ids[:1], ids[1:], images, temperature=temperature)[sampled - 1]


@torch.no_grad()
def on_policy(policy: Policy, trajectory: Trajectory, *, noise: float = 0.0, temperature: float = 1.0) -> Trajectory:
    """Return the trajectory with `policy`'s own logprobs, plus `noise` times a normal random number, as behaviour
    logprobs."""
    logprobs = policy(packed(policy, [trajectory]), temperature).logprobs.numpy()
    logprobs = logprobs + noise * np.random.default_rng(len(logprobs)).normal(size=len(logprobs))
    behaviour = np.zeros(len(trajectory.token_ids), dtype=np.float32)
    behaviour[np.flatnonzero(trajectory.loss_mask)] = np.minimum(logprobs, 0)
    return replace(trajectory, behaviour_logprobs=behaviour)
