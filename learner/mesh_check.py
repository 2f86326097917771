"""A check at the start, if ranks share microbatches or experts, that the model computes the same as on one rank alone.

One small microbatch goes through the sharded model twice. The outputs of every decoder layer and the gradient of every
parameter are compared, and the run ends at the first of them that differs by more than rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from learner.batch.episodes import Document, ExpandedTokens, TrainingEpisode
from learner.batch.image_decoder import ImageDecoder
from learner.batch.microbatch import Microbatch
from learner.batch.packer import pack
from learner.distributed import Ranks, all_sum, own_part
from learner.model.experts import EXPERT, gathered_experts
from learner.model.policy import Policy
from learner.weights.canary import canary_image
from shared.types import Image
from shared.vision import expand

MOST_TOKENS = 2048
NOISE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.1}
"""The largest relative difference that rounding makes, of states and gradients; a wrong cut makes one of order 1."""


@dataclass(slots=True)
class _Results:
    """Results of one forward and backward: each layer's output at this rank's tokens, and this rank's part of each
    gradient."""

    states: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)


def check_shared(policy: Policy, ranks: Ranks, max_tokens: int) -> None:
    """Raise ValueError, naming the first difference, if ranks that share microbatches or experts do not compute what
    one rank does.

    A collective that changes nothing but gradients, which are None afterwards. It does nothing if ranks share neither.
    `max_tokens`: the microbatch's size, if that is less than MOST_TOKENS.
    """
    settings = {
        "context": ranks.context.size,
        "expert": ranks.experts[EXPERT].size() if ranks.experts is not None else 1,
    }
    above = [f"learner.parallel.{name} = {size}" for name, size in settings.items() if size > 1]
    if not above:
        return
    decoder = ImageDecoder(policy.spec)
    episodes = _episodes(policy, decoder, min(max_tokens, MOST_TOKENS))
    shared = pack(episodes, decoder, ranks.device, ranks.context, share_prefixes=False)
    whole = pack(episodes, decoder, ranks.device, share_prefixes=False)
    with gathered_experts(policy):
        expected = _compute(policy, whole, ranks.size, shared.shard.positions if shared.shard is not None else None)
    got = _compute(policy, shared, ranks.size // ranks.context.size, None)
    bound = NOISE[policy.dtype]
    for name, off in _distances(got, expected, ranks):
        if not is_rounding(off, bound):
            raise ValueError(
                f"{' with '.join(above)} does not compute what one rank does: the first difference is in {name}, by "
                f"{off:.2g} of its norm where {policy.dtype} allows {bound:g}; set "
                f"{'both' if len(above) > 1 else 'it'} to 1, or learner.parallel.check = false to go on regardless"
            )


def is_rounding(distance: float, bound: float) -> bool:
    """Tell whether a relative distance is small enough to be rounding; NaN is not."""
    return distance <= bound


def _episodes(policy: Policy, decoder: ImageDecoder, max_tokens: int) -> list[TrainingEpisode]:
    """Return one long document, with an image if the model takes any, and shorter ones without; the same on every
    rank."""
    spec, draw = policy.spec, np.random.default_rng(0)
    pictures = (canary_image(spec),) if spec.takes_images else ()
    ids = np.arange(policy.vlm.config.get_text_config().vocab_size)
    allowed = np.setdiff1d(ids, [*policy.banned_ids, spec.image_token_id])
    room = max_tokens - sum(spec.num_tokens(decoder.grid(picture)) for picture in pictures)
    counts = [max(room // shard, 4) for shard in (2, 4, 8)]
    long, *short = (draw.choice(allowed, count) for count in counts)
    first = _episode(np.insert(long, 1, spec.image_token_id) if pictures else long, pictures, decoder)
    return [first, *(_episode(ids, (), decoder) for ids in short)]


def _episode(token_ids: np.ndarray, images: tuple[Image, ...], decoder: ImageDecoder) -> TrainingEpisode:
    """Return an episode whose prompt consists of two tokens and the images."""
    grids = [decoder.grid(image) for image in images]
    ids, _ = expand(token_ids, grids, decoder.spec)
    targets = np.arange(2 + len(ids) - len(token_ids) + len(images), len(ids))
    positions = np.concatenate([np.arange(len(ids))[None], decoder.spec.position_ids(ids, grids)])
    zeros = np.zeros(len(targets), dtype=np.float32)
    return TrainingEpisode(
        expanded=lambda: ExpandedTokens(ids, positions, targets),
        documents=(Document(len(ids), len(targets), len(images)),),
        images=images,
        grids=tuple(grids),
        behaviour_logprobs=zeros,
        versions=np.zeros(len(targets), dtype=np.int32),
        rewards=zeros,
        turn_end=np.arange(len(targets)) == len(targets) - 1,
        advantage=0.0,
    )


def _compute(policy: Policy, batch: Microbatch, times: int, rows: Tensor | None) -> _Results:
    """Return the states and gradients of one forward and backward.

    `times`: number of ranks, or groups of ranks, that compute the same gradient; `rows`: the rows of the states to
    compare.
    """
    results = _Results()
    with _recording_states(policy, results.states, rows):
        output = policy(batch, 1.0)
    (output.logprobs.mean() + output.values.mean() + 0.0 * output.entropies.sum()).div(times).backward()
    for name, p in policy.named_parameters():
        if p.grad is not None:
            results.gradients[name] = own_part(p.grad).clone()
            p.grad = None
    return results


@contextmanager
def _recording_states(policy: Policy, states: dict[str, Tensor], rows: Tensor | None) -> Iterator[None]:
    """Record each decoder layer's output in `states`. The last layer is left out, because its output has only the
    predictors, in another order; the gradients cover it."""
    layers = policy.decoder.layers

    def hook(index: int) -> Any:
        @torch.compiler.disable
        def record(module: Any, inputs: Any, output: Any) -> None:
            whole = (output[0] if isinstance(output, tuple) else output).detach()[0]
            compared = whole if rows is None else whole[rows]
            states.setdefault(f"the output of decoder layer {index}", compared.float())

        return record

    handles = [layer.register_forward_hook(hook(i)) for i, layer in enumerate(layers[: len(layers) - policy.trimmed])]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _distances(got: _Results, expected: _Results, ranks: Ranks) -> Iterator[tuple[str, float]]:
    """Yield (name, relative distance over all ranks), in the order of computation: forward, then backward."""
    pairs = [(name, got.states[name], expected.states[name]) for name in expected.states]
    names = reversed(list(expected.gradients))
    pairs += [(f"the gradient of {name}", got.gradients[name], expected.gradients[name]) for name in names]
    sums = torch.zeros(len(pairs), 2, dtype=torch.float64, device=ranks.device)
    for row, (_, a, b) in zip(sums, pairs, strict=True):
        row[0], row[1] = (a - b).double().square().sum(), b.double().square().sum()
    norms = all_sum(sums, ranks).sqrt()
    largest = norms[len(got.states) :, 1].norm() if len(norms) > len(got.states) else norms.new_zeros(())
    for number, ((name, *_), (difference, norm)) in enumerate(zip(pairs, norms.tolist(), strict=True)):
        scale = norm if number < len(got.states) else max(norm, 1e-3 * float(largest))
        yield name, difference / scale if scale else difference
