"""The contract between an environment and the actor that plays it.

An environment deals only with texts and images; tokens and limits are the actor's. An environment's module has

    build_env(sample=None, args=None, **_) -> Env          required; may read all of a sample: see shared.types.Sample
    SYSTEM_PROMPT: str  or  system_prompt(args) -> str     optional; used for samples without a prompt of their own
    episode_reward(env) -> float                           optional; otherwise the sum of the turns' rewards
    SETTINGS: a pydantic model                             optional; what args may hold (envs.env_settings)
    TOOLS: list  or  tools(args) -> list                   optional; what the chat template tells the model that it may
                                                           call: functions, or objects of envs.tools.tool.Tool

An Env has `reset` and `step`; `format_observation` and `close` are optional (envs.env_calls calls them all). All of
these, `build_env` and `episode_reward` may be coroutines.
An observation is a dict: "obs_str" (text) and, with images, "multi_modal_data" {placeholder: [PIL images]}.
The info dict of a step may hold "reward" (float, of this turn) and "metrics" (numbers, for the logs); that of `reset`
may hold "metrics" too: they count for an episode that is cut off before its first step. Both may hold "state", what
the next turn is played in: any value that equals itself in another process, such as a tuple; equal states have equal
futures. Objectives with `turn_advantage = "state"` compare turns by it. Both may hold "hint", a text that only a
teacher is told with the observation (learner.objective.teacher).
`format_observation` returns one chat message, or several: those of the role tool are the results of a turn's calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from shared.types import Image, Sample, Trajectory

Observation = dict[str, Any]
Info = dict[str, Any]


class Env(ABC):
    """Base class of the built-in environments. Other environments need not derive from it; having the same methods is
    enough."""

    @abstractmethod
    def reset(self) -> tuple[Observation, Info]:
        """Start the episode anew; the same sample always gives the same start."""

    @abstractmethod
    def step(self, response_text: str) -> tuple[Observation, bool, Info]:
        """Take the model's answer; return (next observation, whether the episode is over, info of the turn)."""

    def format_observation(self, observation: Observation) -> dict[str, Any]:
        """Return the observation as a chat message of the user: images first, then the text."""
        images = [image for group in observation.get("multi_modal_data", {}).values() for image in group]
        content: list[dict[str, Any]] = [{"type": "image", "image": image} for image in images]
        content.append({"type": "text", "text": observation.get("obs_str", "")})
        return {"role": "user", "content": content}

    def close(self) -> None:  # noqa: B027  most environments hold no resources
        """Release the episode's resources."""


@dataclass(frozen=True, slots=True)
class Played:
    """A finished episode, as it is passed to the recipe's reward function.

    `answers` are the model's answers, one per turn; `infos` are the infos that `step` returned for them. There may be
    one info less, since an answer that was cut off is not passed to `step`. `trajectory.ending` is how the episode
    ended. `observations` are the chat messages that the model was shown before each answer; their parts
    {"type": "image"} stand for `images`, in order. With a window of history `trajectory.images` are others: it has an
    image once for each segment that shows it.
    """

    sample: Sample
    trajectory: Trajectory
    answers: tuple[str, ...]
    infos: tuple[Info, ...]
    env: Any
    observations: tuple[tuple[dict[str, Any], ...], ...] = ()
    images: tuple[Image, ...] = ()


def setting(args: Any, name: str, default: Any = None) -> Any:
    """Return the value `name` of a mapping, or the attribute `name` of an object; `default` if it is absent or None."""
    if args is None:
        return default
    value = args.get(name) if hasattr(args, "get") else getattr(args, name, None)
    return default if value is None else value


def metadata_of(sample: Any) -> dict[str, Any]:
    """Return the metadata of a sample, or an empty dict."""
    return dict(getattr(sample, "metadata", None) or {})


def seed_of(sample: Any) -> int:
    """Return the seed from which an environment draws its problem: the sample's, or 0 without a sample. Raise
    ValueError for a sample without a seed, such as a dataset's row."""
    if sample is None:
        return 0
    metadata = metadata_of(sample)
    if "seed" not in metadata:
        raise ValueError(
            f"the sample has no seed, only {', '.join(metadata) or 'no metadata'}: is it another task's row?"
        )
    return int(metadata["seed"])


def total_turn_reward(infos: list[Info]) -> float:
    """Return the sum of the turns' rewards: the episode reward of an environment without `episode_reward`."""
    return float(sum(float(info.get("reward", 0.0)) for info in infos))


def flat_metrics(metrics: dict[str, Any]) -> dict[str, float]:
    """Return the numbers in a step's nested metrics, by their innermost names."""
    flat: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, dict):
            flat |= flat_metrics(value)
        elif isinstance(value, (bool, int, float)):
            flat[name] = float(value)
    return flat
