"""One update: forward, loss and backward of its microbatches, then the gradient of all ranks is clipped and applied.

Shape suffixes: N = sampled tokens of one microbatch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from learner.batch.microbatch import Microbatch
from learner.batch.rank_load import load_of
from learner.batch.update_plan import UpdatePlan
from learner.distributed import Ranks, all_sum
from learner.metrics.token_metrics import TokenStats, loss_columns
from learner.model.context_collectives import lowest
from learner.model.policy import PolicyOutput
from learner.model.sharding import add_up_replicas, forward_only
from learner.objective.loss_records import Loss, Tokens
from learner.objective.objectives import loss_of
from learner.recording.recorded_columns import recorded_columns
from learner.training.models import Models
from learner.training.optim import clip_, local_gradients, squares
from learner.training.precomputed import precompute_pieces
from learner.training.step_totals import StepTotals
from learner.training.token_inputs import make_tokens
from shared.config.learner_section import LearnerConfig
from shared.config.objective_section import ObjectiveConfig


def make_update(
    plan: UpdatePlan,
    batches: Iterator[Microbatch],
    models: Models,
    optimizer: Optimizer,
    totals: StepTotals,
    *,
    separate: frozenset[Tensor] = frozenset(),
) -> bool:
    """Compute and apply one gradient. Return False, with no weight changed, if the policy has already moved far enough.

    `batches`: iterator from which the plan's microbatches are taken. `separate`: parameters whose gradient is clipped
    separately. A collective.
    """
    config, ranks = models.config, models.ranks
    divisor = max(plan.num_tokens if config.objective.aggregation == "token_mean" else plan.num_episodes, 1)
    sums = torch.zeros(4, dtype=torch.float64, device=ranks.device)  # loss, dropped weights, KL, tokens
    optimizer.zero_grad()
    totals.clock.lap("prepare")
    if plan.pieces is not None:
        first = islice(batches, len(plan.pieces.microbatches))
        totals.pieces = precompute_pieces(plan.pieces, first, models)
        totals.clock.lap("forward")
    for left in reversed(range(len(plan.microbatches))):
        batch = totals.precomputed.add_to(next(batches))
        totals.loads.append(load_of(batch, models.sizes))
        totals.clock.lap("prepare")
        sums += accumulate_gradient(batch, divisor, models, totals, last=not left)
    totals.last = plan
    parts = local_gradients(optimizer, separate)
    numbers = all_sum(torch.cat([sums, squares(parts, ranks)]), ranks).tolist()  # the host waits here
    (total, dropped, divergence, count), norms = numbers[:4], np.sqrt(numbers[4:])
    totals.divergences.append(divergence / max(count, 1.0))
    limit = config.guard.max_kl
    if limit and totals.divergences[-1] - totals.divergences[0] > limit:
        optimizer.zero_grad()
        return False
    kept_share = 1.0 - dropped / divisor if plan.num_tokens else 0.0
    apply_gradient(optimizer, parts, norms, kept_share, config, totals, is_finite=bool(np.isfinite(total)))
    totals.clock.lap("optimizer")
    return True


@torch.no_grad()
def observe(batches: Iterable[Microbatch], models: Models, totals: StepTotals) -> None:
    """Measure tokens of episodes that no update computes, without gradient. A collective."""
    for batch in batches:
        output = forward_only(models.policy, batch, models.temperature)
        if models.ranks.context.leads and not batch.empty:
            tokens = make_tokens(batch, output, None, None, torch.ones_like(batch.episode_tokens))
            loss = loss_of(tokens, models.config.objective, totals.scaling)
            _add_up(batch, totals.observed, tokens, loss, totals)


def token_weights(episode_tokens_N: Tensor, objective: ObjectiveConfig) -> Tensor:
    """Return each token's weight in the loss, whose sum is divided by the update's tokens (`token_mean`), else by its
    episodes. `episode_tokens_N`: sampled tokens of its episode."""
    if objective.aggregation == "token_mean":
        return torch.ones_like(episode_tokens_N)
    if objective.aggregation == "constant":
        return torch.full_like(episode_tokens_N, 1.0 / objective.aggregation_divisor)
    return 1.0 / episode_tokens_N


def accumulate_gradient(
    batch: Microbatch,
    divisor: int,
    models: Models,
    totals: StepTotals,
    *,
    last: bool,
) -> Tensor:
    """Add one microbatch's part of the update's gradient; return float64 [4]: loss, dropped weights, KL and number of
    tokens.

    Only the leading rank of a context group returns values other than 0. `last`: this is the update's last microbatch.
    """
    reference = models.reference_output(batch)
    output = models.policy_output(batch, reference)
    loss, *counts = microbatch_loss(batch, output, reference, divisor, models, totals)
    totals.clock.lap("forward")
    add_up_replicas(models.policy, models.ranks, now=last)
    loss.backward()
    totals.clock.lap("backward")
    sums = torch.stack([value.detach() for value in (loss, *counts)]).double()
    return sums if models.ranks.context.leads else torch.zeros_like(sums)


def microbatch_loss(
    batch: Microbatch,
    output: PolicyOutput,
    reference: PolicyOutput | None,
    divisor: int,
    models: Models,
    totals: StepTotals,
) -> list[Tensor]:
    """Return this microbatch's part of the update's loss, differentiable; the sum of the weights that it drops; and
    both sums of `policy_divergence`."""
    objective, ranks = models.config.objective, models.ranks
    unused = 0.0 * (output.logprobs.sum() + output.entropies.sum() + output.values.sum())
    divergence = policy_divergence(batch, output.logprobs, ranks)
    if batch.empty:
        return [unused, torch.zeros_like(unused), *divergence]
    proximal = None
    if objective.proximal == "learner":  # in a step's only update the policy is still what it was
        proximal = output.logprobs.detach() if batch.proximal_logprobs is None else batch.proximal_logprobs
    weights = token_weights(batch.episode_tokens, objective)
    readable, others = lowest(batch.readable, batch.shard), _of_other_pieces(batch, totals)
    if batch.whole is not None and "readable" in others:
        divided = torch.zeros_like(batch.whole.rewards).index_put((batch.whole.own,), readable)
        readable = torch.minimum(divided, others["readable"])[batch.whole.own]
    tokens = make_tokens(batch, output, reference, proximal, weights * readable, others)
    loss = loss_of(tokens, objective, totals.scaling)
    if ranks.context.leads:  # the other ranks of the group have the same tokens
        _add_up(batch, totals.stats, tokens, loss, totals)
        if totals.recorded is not None:
            columns = recorded_columns(tokens, loss)
            own_columns = columns if batch.whole is None else columns[:, batch.whole.own]
            totals.recorded.add(batch, own_columns, update=len(totals.divergences))
    dropped = (weights * (1.0 - readable)).sum()
    if loss.dropped is not None:
        dropped = dropped + (tokens.weights * loss.dropped.any_N).sum()
    if objective.aggregation == "constant":  # what is left out makes the divisor no smaller
        dropped = torch.zeros_like(dropped)
    # Every output takes part in every backward, since the other ranks may use it.
    return [loss.total / divisor + unused, dropped, *divergence]


def _of_other_pieces(batch: Microbatch, totals: StepTotals) -> dict[str, Tensor]:
    """Return what is known of the other pieces of a microbatch's episodes: columns [W] by name; none for whole
    episodes."""
    if batch.whole is None:
        return {}
    names = ("logprobs", "values", "readable", "reference_logprobs")
    found = {name: totals.pieces.of_whole_episodes(name, batch) for name in names}
    found["proximal_logprobs"] = found["logprobs"]  # in a step's only update
    for name in ("proximal_logprobs", "reference_logprobs", "teacher_logprobs", "teacher_baselines"):
        before = totals.precomputed.of_whole_episodes(name, batch)
        found[name] = found.get(name) if before is None else before
    return {name: column for name, column in found.items() if column is not None}


def _add_up(batch: Microbatch, stats: TokenStats, tokens: Tokens, loss: Loss, totals: StepTotals) -> None:
    """Add a microbatch's tokens to the sums for metrics."""
    columns = loss_columns(tokens, loss)
    if batch.whole is None:
        stats.add(totals.version - batch.versions, columns)
    else:
        stats.add(totals.version - batch.whole.versions, columns, own=batch.whole.own)


def policy_divergence(batch: Microbatch, logprobs_N: Tensor, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """Return the sum of estimates (k3) of KL(start, policy) over the tokens that this rank counts, and their number.

    The start is the policy as the step began or, if its logprobs were not computed, the behaviour policy.
    """
    if batch.empty or not ranks.context.leads:
        zero = torch.zeros((), device=ranks.device)
        return zero, zero
    start_N = batch.behaviour_logprobs if batch.proximal_logprobs is None else batch.proximal_logprobs
    change_N = (logprobs_N - start_N).detach()
    return (change_N.expm1() - change_N).sum(), torch.ones_like(change_N).sum()


def apply_gradient(
    optimizer: Optimizer,
    parts: list[list[Tensor]],
    norms: np.ndarray,
    kept_share: float,
    config: LearnerConfig,
    totals: StepTotals,
    *,
    is_finite: bool,
) -> None:
    """Clip and apply the gradient, unless it or the loss is not finite, or there is none.

    A gradient of 0 changes no weight, not even by momentum or decay. `parts`: this rank's gradients; `norms`: of the
    whole gradients. `kept_share`: share of the weights in the gradient's divisor that were not dropped. `is_finite`:
    whether the loss is finite.
    """
    if 0.0 < kept_share < 1.0:
        norms = norms / kept_share
        for gradients in filter(None, parts):
            torch._foreach_div_(gradients, kept_share)
    totals.norms.append(norms.tolist())
    is_sound = is_finite and bool(np.isfinite(norms).all())
    totals.num_bad += not is_sound
    if kept_share <= 0.0 or not is_sound:
        totals.num_skipped += 1
    elif norms.max() > 0.0:
        for gradients, norm in zip(parts, norms, strict=True):
            clip_(gradients, norm, config.optimizer.max_grad_norm)
        optimizer.step()
    optimizer.zero_grad()
