"""Critics, which estimate the value of a state: a linear map of the policy's final hidden state, or a perceptron over
states of several layers.

Shape suffixes: T = packed tokens, N = sampled tokens, H = hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

MOST_TURNS = 32  # later turns share this index
NUM_LAYERS = 3  # layers that a deep critic reads, besides the final state


class LinearCritic(nn.Linear):
    """A linear map of the final hidden state, initially 0. The gradient of its loss flows into the policy too."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1, dtype=torch.float32)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, final_NH: Tensor) -> Tensor:
        """Return the values, float32 [N]."""
        return super().forward(final_NH.float()).sum(-1)


class DeepCritic(nn.Module):
    """A perceptron over normalised hidden states of several layers and the turn's index, initially 0.

    The policy's final state is shaped for the next token and carries little information about the value; lower layers
    and the turn's index carry more. The states come detached: the critic's loss trains only the critic, no layer of the
    policy.
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

    @property
    def bias(self) -> Tensor:
        """The last addend of every value, as `LinearCritic.bias`, [1]."""
        return self.leave.bias

    def forward(self, states: list[Tensor], turns_N: Tensor) -> Tensor:
        """Return the values, float32 [N], from `num_states` detached states [N,H] and the turns' indices, int64 [N]."""
        read = torch.cat([norm(state.float()) for norm, state in zip(self.norms, states, strict=True)], dim=-1)
        hidden = nn.functional.gelu(self.enter(read) + self.turns(turns_N.clamp(max=MOST_TURNS)))
        return self.leave(hidden + nn.functional.gelu(self.middle(hidden))).sum(-1)


class Listener:
    """Records the outputs of chosen decoder layers at the predictors' positions during one forward, detached."""

    def __init__(self, layers: list[nn.Module]) -> None:
        self._rows: Tensor | None = None
        self._states: list[Tensor] = []
        for layer in layers:
            layer.register_forward_hook(self._record)

    def listen(self, rows_N: Tensor) -> None:
        """Start recording, before a forward. `rows_N`: int64 indices of positions among the forward's T."""
        self._rows, self._states = rows_N, []

    def take(self) -> list[Tensor]:
        """Return the recorded states and stop recording: one [N,H] for each layer, lowest first."""
        states, self._rows, self._states = self._states, None, []
        return states

    @torch.compiler.disable
    def _record(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._rows is not None:
            hidden_1TH = output[0] if isinstance(output, tuple) else output
            self._states.append(hidden_1TH.detach()[0].index_select(0, self._rows))


def chosen_layers(num_layers: int, count: int = NUM_LAYERS) -> list[int]:
    """Return the indices of at most `count` layers below the last one, evenly spread."""
    below = num_layers - 1
    count = min(count, below)
    return [round((i + 1) * below / count) - 1 for i in range(count)]
