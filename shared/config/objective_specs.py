"""The registry of objectives: each entry names the loss function and what the rest of the learner must know about it.

Nothing elsewhere compares an objective's name. Importing this module does not import the loss functions; the learner
does that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shared.config.named_functions import NamedFunction, load_function

THIS_FILE = "shared/config/objective_specs.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveSpec:
    """What is known about an objective without running it, for checking a recipe and for planning."""

    name: str
    loss: NamedFunction  # (Tokens, ObjectiveConfig, Scaling) -> Loss
    is_group_relative: bool = False  # advantages compare the episodes of one sample
    has_critic: bool = False  # it uses and trains the value head
    has_traces: bool = False  # it multiplies ratios along V-trace's traces
    has_episode_ratios: bool = False  # a token's weight depends on the ratios of its whole episode
    clips: bool = True  # it drops the gradient of tokens whose ratio is far from 1
    clip_setting: str = ""  # name of the setting in learner.objective that switches the clip off; "" = none
    zero_advantage_means_zero_loss: bool = False  # such episodes are then left out of the microbatches
    learns_from_rewards: bool = True  # false: from the tokens alone, whoever wrote them and whatever they earned
    whitens: bool = False  # the advantages of all tokens of a step are centred and divided by their deviation
    implied: Mapping[str, Any] = field(default_factory=dict, hash=False)  # settings that are part of it, by name

    def load_loss(self) -> Callable[..., Any]:
        """Return the loss function. Raise ValueError, in one line, if it cannot be imported."""
        return load_function(self.loss, f"objective {self.name!r} of {THIS_FILE}")


_MODULE = "learner.objective.objectives"
OBJECTIVES: dict[str, ObjectiveSpec] = {
    spec.name: spec
    for spec in (
        ObjectiveSpec(
            name="vtrace", loss=f"{_MODULE}:vtrace", has_critic=True, has_traces=True, clip_setting="vtrace_clip"
        ),
        ObjectiveSpec(name="ppo", loss=f"{_MODULE}:ppo", has_critic=True),
        ObjectiveSpec(name="grpo", loss=f"{_MODULE}:grpo", is_group_relative=True, zero_advantage_means_zero_loss=True),
        ObjectiveSpec(
            name="dr_grpo",
            loss=f"{_MODULE}:grpo",
            is_group_relative=True,
            zero_advantage_means_zero_loss=True,
            implied={"divide_by_std": False, "aggregation": "constant"},
        ),
        ObjectiveSpec(
            name="reinforce++",
            loss=f"{_MODULE}:grpo",
            is_group_relative=True,
            whitens=True,
            implied={"divide_by_std": False},
        ),
        ObjectiveSpec(
            name="gspo",
            loss=f"{_MODULE}:gspo",
            is_group_relative=True,
            has_episode_ratios=True,
            zero_advantage_means_zero_loss=True,
        ),
        ObjectiveSpec(
            name="cispo",
            loss=f"{_MODULE}:cispo",
            is_group_relative=True,
            clips=False,
            zero_advantage_means_zero_loss=True,
        ),
        ObjectiveSpec(name="sapo", loss=f"{_MODULE}:sapo", is_group_relative=True, zero_advantage_means_zero_loss=True),
        ObjectiveSpec(name="dppo", loss=f"{_MODULE}:dppo", is_group_relative=True, zero_advantage_means_zero_loss=True),
        ObjectiveSpec(name="sft", loss=f"{_MODULE}:sft", clips=False, learns_from_rewards=False),
    )
}


def objective_spec(name: str) -> ObjectiveSpec:
    """Return an objective's entry. Raise ValueError, in one line with the cure, for a name without one."""
    if name not in OBJECTIVES:
        raise ValueError(
            f"learner.objective.name = {name!r} is no objective; set it to one of {', '.join(OBJECTIVES)}, or add an "
            f"entry to OBJECTIVES in {THIS_FILE}"
        )
    return OBJECTIVES[name]


def names_with_critic() -> str:
    """Return the names of the objectives that train a critic, for a sentence."""
    return " or ".join(repr(spec.name) for spec in OBJECTIVES.values() if spec.has_critic)
