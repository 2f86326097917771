"""What the reference is sure of is held: which tokens these are, and what the term of the loss does."""

from __future__ import annotations

import pytest
import torch

from learner.model import head
from learner.model.head import find_labels
from learner.model.policy import Policy, load_policy
from learner.objective.loss_terms import hold_term
from learner.training.trainer import Trainer
from tests.support.episodes import learner_config, packed, random_groups

LEAST, BANNED = 0.8, (3, 7)


def drawn(rows: int = 60, hidden: int = 8, tokens: int = 20) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, a head, and sampled tokens; half of the rows are sure of one."""
    torch.manual_seed(0)
    hidden_NH = torch.randn(rows, hidden) * torch.tensor([1.0, 20.0]).repeat(rows // 2)[:, None]
    weight_VH = torch.randn(tokens, hidden)
    choices_V = torch.tensor([v for v in range(tokens) if v not in BANNED])
    sampled_N = choices_V[torch.randint(len(choices_V), (rows,))]
    best_N = plain(hidden_NH, weight_VH).argmax(-1)
    return hidden_NH, weight_VH, torch.where(torch.rand(rows) < 0.4, best_N, sampled_N)


def plain(hidden_NH: torch.Tensor, weight_VH: torch.Tensor) -> torch.Tensor:
    """float64 log probabilities [N,V] without the banned tokens, at temperature 0.7."""
    logits_NV = hidden_NH.double() @ weight_VH.double().T / 0.7
    logits_NV[:, list(BANNED)] = -torch.inf
    return logits_NV.log_softmax(-1)


@pytest.mark.parametrize("chunk_bytes", [1 << 26, 300])
def test_labels_are_the_tokens_of_enough_probability(monkeypatch, chunk_bytes):
    monkeypatch.setattr(head, "CHUNK_BYTES", chunk_bytes)
    hidden_NH, weight_VH, sampled_N = drawn()
    logprobs_NV = plain(hidden_NH, weight_VH)
    own_N = logprobs_NV.gather(1, sampled_N[:, None])[:, 0]
    found = find_labels(hidden_NH, weight_VH, own_N, threshold=LEAST, temperature=0.7, banned_ids=BANNED)
    highest_N, best_N = logprobs_NV.exp().max(-1)
    sure_N, same_N = highest_N >= LEAST, best_N == sampled_N
    assert torch.equal(found.agrees_N, sure_N & same_N)
    assert torch.equal(found.rows_K, (sure_N & ~same_N).nonzero()[:, 0])
    assert torch.equal(found.ids_K, best_N[found.rows_K])
    assert min(len(found.rows_K), int(found.agrees_N.sum()), int((~sure_N).sum())) >= 5


def test_the_term_is_the_cross_entropy_to_the_labels():
    hidden_NH, weight_VH, sampled_N = drawn()
    theirs_NV = plain(hidden_NH, weight_VH)
    own_N = theirs_NV.gather(1, sampled_N[:, None])[:, 0]
    known = find_labels(hidden_NH, weight_VH, own_N, threshold=LEAST, temperature=0.7, banned_ids=BANNED)
    logits_NV = torch.randn(len(sampled_N), len(weight_VH), dtype=torch.float64, requires_grad=True)
    mine_NV = logits_NV.log_softmax(-1)
    of_labels_K = mine_NV[known.rows_K, known.ids_K]
    term_N = hold_term(mine_NV.gather(1, sampled_N[:, None])[:, 0], known, of_labels_K)
    highest_N, best_N = theirs_NV.exp().max(-1)
    expected_N = -mine_NV.gather(1, best_N[:, None])[:, 0] * (highest_N >= LEAST)
    torch.testing.assert_close(term_N, expected_N)
    got, expected = (torch.autograd.grad(x.sum(), logits_NV, retain_graph=True)[0] for x in (term_N, expected_N))
    torch.testing.assert_close(got, expected)


def sure(folder, spec) -> Policy:
    """A reference that is sure of much."""
    reference = load_policy(str(folder), spec)
    with torch.no_grad():
        reference.vlm.get_output_embeddings().weight.mul_(30)
    return reference.requires_grad_(False)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["vtrace", "grpo"])
def test_the_policy_is_taught_what_the_reference_is_sure_of(folder, spec, ranks, objective):
    """The metric is the mean of -log pi over all tokens, and falls; without the weight nothing is asked or held."""
    groups, reference = random_groups(spec, 3, group_size=2), sure(folder, spec)
    policy, found = load_policy(str(folder), spec), []
    config = learner_config(objective=objective, group_size=2, hold_coef=1.0, hold_probability=0.6, lr=1e-2)
    batch = packed(policy, [t for group in groups for t in group.trajectories])
    known = reference(batch, 1.0, label_threshold=0.6).labels
    said = policy(batch, 1.0, labels=known)
    assert len(known.rows_K) > 10
    expected = hold_term(said.logprobs, known, said.label_logprobs).mean().item()
    trainer = Trainer(policy, config, ranks, reference=reference)
    found = [trainer.step(groups, version=0)["reference/hold"] for _ in range(6)]
    assert found[0] == pytest.approx(expected, rel=1e-4)
    assert found[-1] < 0.7 * found[0]
