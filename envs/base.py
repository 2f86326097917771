"""What an environment is: the contract between a task and the actor that plays it.

An environment speaks in texts and images only; tokens and limits belong to the actor. A module of its own offers

    build_env(sample=None, args=None, **_) -> Env          required; reads only sample.label and sample.metadata
    SYSTEM_PROMPT: str  or  system_prompt(args) -> str     optional; used for samples without a prompt of their own
    episode_reward(env) -> float                           optional; otherwise the sum of the turns' rewards
    SETTINGS: a pydantic model                             optional; what args may hold (envs.settings)

An observation is a dict: "obs_str" (text) and, with images, "multi_modal_data" {placeholder: [PIL images]}.
The info dict of a step may hold "reward" (float, of this turn) and "metrics" (numbers, for the logs).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from shared.types import Sample, Trajectory

Observation = dict[str, Any]
Info = dict[str, Any]


class Env(ABC):
    """Base class of the built-in environments. An own environment may just as well only have the same methods."""

    @abstractmethod
    def reset(self) -> tuple[Observation, Info]:
        """Start the episode anew; the same sample always gives the same start."""

    @abstractmethod
    def step(self, response_text: str) -> tuple[Observation, bool, Info]:
        """Take the model's answer; return what it sees next, whether the episode is over, and the turn's info."""

    def format_observation(self, observation: Observation) -> dict[str, Any]:
        """The observation as a chat message of the user: images first, then the text."""
        images = [image for group in observation.get("multi_modal_data", {}).values() for image in group]
        content: list[dict[str, Any]] = [{"type": "image", "image": image} for image in images]
        content.append({"type": "text", "text": observation.get("obs_str", "")})
        return {"role": "user", "content": content}

    def close(self) -> None:  # noqa: B027  most environments hold nothing
        """Release what the episode holds."""


@dataclass(frozen=True, slots=True)
class Played:
    """A finished episode, as a reward function of the recipe's sees it.

    `answers` is what the model wrote, turn by turn; `infos` what the environment's `step` said of each of them (an
    answer cut off by its length was not shown to it, so there may be one less). `trajectory.ending` says how it ended.
    """

    sample: Sample
    trajectory: Trajectory
    answers: tuple[str, ...]
    infos: tuple[Info, ...]
    env: Any


def setting(args: Any, name: str, default: Any = None) -> Any:
    """`name` of a mapping or of an object's attributes; `default` where it is absent or None."""
    if args is None:
        return default
    value = args.get(name) if hasattr(args, "get") else getattr(args, name, None)
    return default if value is None else value


def metadata_of(sample: Any) -> dict[str, Any]:
    """The metadata of a sample, or an empty dict."""
    return dict(getattr(sample, "metadata", None) or {})


def seed_of(sample: Any) -> int:
    """What an environment draws its problem from: the sample's seed, 0 without a sample. ValueError for a sample that
    has none, such as a dataset's row."""
    if sample is None:
        return 0
    metadata = metadata_of(sample)
    if "seed" not in metadata:
        raise ValueError(
            f"the sample has no seed, only {', '.join(metadata) or 'no metadata'}: is it another task's row?"
        )
    return int(metadata["seed"])


def total_turn_reward(infos: list[Info]) -> float:
    """Sum of the turns' rewards: the episode reward of an environment that states none."""
    return float(sum(float(info.get("reward", 0.0)) for info in infos))


def flat_metrics(metrics: dict[str, Any]) -> dict[str, float]:
    """The numbers of a step's nested metrics under their innermost names."""
    flat: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, dict):
            flat |= flat_metrics(value)
        elif isinstance(value, (bool, int, float)):
            flat[name] = float(value)
    return flat
