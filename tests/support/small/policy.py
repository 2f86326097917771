"""A policy of a few thousand parameters for the learner's trainer, which sees only the last few tokens.

It has the parts of `learner.model.policy.Policy` that a trainer uses. Shape suffixes: N = sampled tokens, C = tokens of
context, H = hidden size, A = actions.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from learner.batch.microbatch import Microbatch
from learner.model.policy import PolicyOutput
from shared.families.registry import FAMILIES
from shared.vision import VisionSpec

VOCAB_SIZE, CONTEXT, EMBEDDING, HIDDEN = 32, 3, 16, 48


class SmallPolicy(nn.Module):
    """A small policy that samples only the actions, tokens 0 to A-1. Initially its values are 0, and it is uniform or,
    with a `spread`, its logits differ by about this much."""

    def __init__(self, num_actions: int, seed: int, spread: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.vlm = Body(num_actions)
        nn.init.normal_(self.vlm.leave.weight, std=spread / HIDDEN**0.5)
        self.value_head = nn.Linear(HIDDEN, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        self.spec = VisionSpec(image_token_id=VOCAB_SIZE, family=FAMILIES["qwen3_vl"])
        self.banned_ids: tuple[int, ...] = ()
        self.has_deep_critic = False

    def forward(
        self,
        batch: Microbatch,
        temperature: float,
        lower: None = None,
        *,
        return_lower: None = None,
        label_threshold: None = None,
        labels: None = None,
    ) -> PolicyOutput:
        ids_T, position_T, predictors_N = batch.input_ids[0], batch.position_ids[0, 0], batch.predictors
        if (prefixes := batch.packing.prefixes) is not None:  # whole episodes, as attention reads them
            ids_T, position_T = ids_T[prefixes.rows], position_T[prefixes.rows]
            predictors_N = batch.packing.asked.positions
        back_NC = predictors_N[:, None] - torch.arange(CONTEXT)
        seen_NC = position_T[predictors_N][:, None] >= torch.arange(CONTEXT)
        tokens_NC = torch.where(seen_NC, ids_T[back_NC.clamp(min=0)], VOCAB_SIZE)
        logprobs_NA, hidden_NH = self.vlm(tokens_NC)
        chosen_N = logprobs_NA.gather(1, batch.target_ids[:, None])[:, 0]
        entropies_N = -(logprobs_NA.exp() * logprobs_NA).sum(-1)
        return PolicyOutput(chosen_N, entropies_N, self.value_head(hidden_NH)[:, 0])

    @torch.no_grad()
    def logprobs(self, tokens_NC: Tensor) -> Tensor:
        """Return logprobs [N,A] after the last C tokens, latest first, filled with VOCAB_SIZE before the first."""
        return self.vlm(tokens_NC)[0]


class Body(nn.Module):
    def __init__(self, num_actions: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(to_dict=dict)  # not a known model type
        self.embed = nn.Embedding(VOCAB_SIZE + 1, EMBEDDING)
        self.enter = nn.Linear(CONTEXT * EMBEDDING, HIDDEN)
        self.leave = nn.Linear(HIDDEN, num_actions, bias=False)

    def forward(self, tokens_NC: Tensor) -> tuple[Tensor, Tensor]:
        hidden_NH = torch.tanh(self.enter(self.embed(tokens_NC).flatten(1)))
        return self.leave(hidden_NH).log_softmax(-1), hidden_NH
