"""Measures how much more likely the policy's words are under their own images than under others."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from learner.batch.microbatch import Microbatch
from learner.distributed import all_sum
from learner.model.sharding import forward_only
from learner.training.models import Models


@torch.no_grad()
def image_gain(batches: Iterable[Microbatch], models: Models) -> dict[str, float]:
    """Return the metric `vision/image_gain`: the mean, over sampled tokens, of the policy's logprob of the token under
    its episode's own images less that under another episode's, in nats. {} without an episode to measure. A collective.

    `batches`: microbatches of the pairs of `with_other_images`.
    """
    sums = torch.zeros(2, 2, dtype=torch.float64, device=models.ranks.device)  # own and other: logprobs, tokens
    for batch in batches:
        logprobs_N = forward_only(models.policy, batch, models.temperature).logprobs
        if batch.empty or not models.ranks.context.leads:
            continue
        for index, logprobs in zip(batch.indices, logprobs_N.split(batch.sampled), strict=True):
            sums[int(index < 0)] += torch.stack([logprobs.double().sum(), logprobs.new_tensor(len(logprobs)).double()])
    (own, count), (other, _) = all_sum(sums, models.ranks).tolist()
    return {"vision/image_gain": (own - other) / count} if count else {}
