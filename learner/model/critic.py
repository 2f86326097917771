"""The value of a state: a linear map of the policy's final hidden state, or a perceptron over what several layers know.

Shape suffixes: T = packed tokens, N = sampled tokens, H = hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

MOST_TURNS = 32  # later turns count as this one
NUM_LAYERS = 3  # that a deep critic reads, besides the final state


class LinearCritic(nn.Linear):
    """A linear map of the final hidden state; it starts at 0. Its loss is differentiated through the policy too."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1, dtype=torch.float32)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, final_NH: Tensor) -> Tensor:
        """float32 [N]"""
        return super().forward(final_NH.float()).sum(-1)


class DeepCritic(nn.Module):
    """A perceptron over hidden states of several layers, each normalised, and over the turn's index; it starts at 0.

    The policy's final state is shaped for the next token and hardly shows the value; states below it and the turn say
    more. Its states come detached: its loss moves the critic alone, and no layer of the policy.
    """

    def __init__(self, hidden_size: int, num_states: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(hidden_size, dtype=torch.float32) for _ in range(num_states))
        self.turns = nn.Embedding(MOST_TURNS + 1, width, dtype=torch.float32)
        self.enter = nn.Linear(num_states * hidden_size, width, dtype=torch.float32)
        self.middle = nn.Linear(width, width, dtype=torch.float32)
        self.leave = nn.Linear(width, 1, dtype=torch.float32)
        nn.init.zeros_(self.turns.weight)
        nn.init.zeros_(self.leave.weight)
        nn.init.zeros_(self.leave.bias)

    def forward(self, states: list[Tensor], turns_N: Tensor) -> Tensor:
        """float32 [N], of `num_states` detached states [N,H] and the turns' indices, int64 [N]."""
        read = torch.cat([norm(state.float()) for norm, state in zip(self.norms, states, strict=True)], dim=-1)
        hidden = nn.functional.gelu(self.enter(read) + self.turns(turns_N.clamp(max=MOST_TURNS)))
        return self.leave(hidden + nn.functional.gelu(self.middle(hidden))).sum(-1)


class Listener:
    """Keeps what chosen decoder layers put out at the predictors' places in one forward, without its gradient."""

    def __init__(self, layers: list[nn.Module]) -> None:
        self._rows: Tensor | None = None
        self._heard: list[Tensor] = []
        for layer in layers:
            layer.register_forward_hook(self._hear)

    def listen(self, rows_N: Tensor) -> None:
        """Before a forward; `rows_N`: int64 places among its T."""
        self._rows, self._heard = rows_N, []

    def take(self) -> list[Tensor]:
        """After the forward: one [N,H] a layer, lowest first."""
        heard, self._rows, self._heard = self._heard, None, []
        return heard

    @torch.compiler.disable
    def _hear(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._rows is not None:
            hidden_1TH = output[0] if isinstance(output, tuple) else output
            self._heard.append(hidden_1TH.detach()[0].index_select(0, self._rows))


def chosen_layers(num_layers: int, count: int = NUM_LAYERS) -> list[int]:
    """At most `count` layers below the last one, evenly spread."""
    below = num_layers - 1
    count = min(count, below)
    return [round((i + 1) * below / count) - 1 for i in range(count)]
