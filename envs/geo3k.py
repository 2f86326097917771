r"""Geometry problems with a diagram, one turn: the model answers, its last \boxed{} is graded against the label.

A sample has either the problem in its prompt and the answer as its label (a dataset row), or only metadata["seed"],
from which a triangle problem is drawn (with the settings of `envs.geometry.triangles`). Without a sample, the problem
of seed 0 is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from envs.base import Env, Info, Observation, metadata_of
from envs.env_settings import read_settings
from envs.geometry.triangle_words import read_accuracy
from envs.geometry.triangles import Problem, TriangleSettings, make_problem
from envs.math_grading.normalize import last_box, without_thoughts
from envs.math_reward import LIMIT_S, Verdict, reward_function
from shared.families.marks import THOUGHT

SYSTEM_PROMPT = (
    "Solve the geometry problem about the image. Think step by step, then give the final answer in \\boxed{}, "
    "like this: Answer: \\boxed{42}"
)


def build_env(sample: Any = None, args: Any = None, **_: Any) -> Geo3kEnv:
    """Return the environment of a sample. Raise ValueError if the sample has neither a label nor a seed."""
    settings = read_settings(GeometrySettings, sample, args)
    return Geo3kEnv(*task_of(sample, settings), settings, choices_of(sample))


class GeometrySettings(TriangleSettings):
    """How a problem without a label is drawn, and how an answer becomes a reward."""

    reward_model: Literal["default", "geo3k"] = Field(
        "default",
        description="default: 1 for a right answer, else 0; geo3k: 0.9 for a right answer and 0.1 for its form, "
        "`<think>...</think>` and, after it, an answer in a box",
    )
    tolerance: float | None = Field(
        None,
        description="which numbers are right: null, the label's value as its writing allows; 0.05, also one that is at "
        "most 0.05 away; 0.0, no rounding (36.87 ≈ 36.9) and no 60% for 60",
    )
    format_reward: float = Field(
        0.0, description="given once an episode, for an answer (with a tool: a call) of the right form"
    )
    grade_limit_s: float = Field(LIMIT_S, gt=0, description="seconds for grading an answer; beyond is a reward_timeout")
    diagnostics: bool = Field(False, description="of drawn problems: also measures whether `<think>` is right")


SETTINGS = GeometrySettings
GRADES_MATHEMATICS = True


def task_of(sample: Any, settings: TriangleSettings) -> tuple[str, Problem | None]:
    """Return the label of a sample and the drawn problem; None in place of the problem if it is in the prompt."""
    label = getattr(sample, "label", None)
    if label is not None:
        return str(label), None
    metadata: dict[str, Any] = {"seed": 0} if sample is None else metadata_of(sample)
    if "seed" not in metadata:
        raise ValueError("a geometry sample needs a label, or a seed in its metadata for a drawn problem")
    problem = make_problem(metadata["seed"], settings, metadata.get("split", ""))
    return problem.answer, problem


def choices_of(sample: Any) -> tuple[str, ...]:
    """Return the texts of the options of a multiple-choice sample, from its metadata["choices"]; () for others."""
    choices = metadata_of(sample).get("choices") or ()
    return tuple(map(str, choices))


def episode_reward(env: Geo3kEnv) -> float:
    """Return the score of the model's answers, plus the format reward that they earned. Raise TimeoutError if grading
    took too long."""
    if env.verdict().outcome == "timeout":
        raise TimeoutError("grading the answer took longer than its limit")
    return env.score() + env.bonus


def has_form(response: str) -> bool:
    """Tell whether a response holds <think>...</think> and, after it, an answer in a box. The opening tag may be
    missing: the chat templates of thinking models write it before the response begins."""
    thought, closed, rest = response.partition(THOUGHT.closing)
    opened = THOUGHT.opening in thought or THOUGHT.opening not in response
    return bool(opened and closed and last_box(rest))


VERDICT_METRICS = ("success", "answered", "reward_timeout")


def verdict_metrics(verdict: Verdict) -> dict[str, float]:
    """Return metrics of a verdict, with one for a timeout, so that it is not mistaken for a wrong answer."""
    values = (verdict.score, float(verdict.outcome != "no_answer"), float(verdict.outcome == "timeout"))
    return dict(zip(VERDICT_METRICS, values, strict=True))


class Geo3kEnv(Env):
    """One problem. `written` collects the model's answers; only these are graded."""

    def __init__(
        self, label: str, problem: Problem | None, settings: GeometrySettings, choices: Sequence[str] = ()
    ) -> None:
        self.label = label
        self.problem = problem
        self.settings = settings
        self.choices = choices
        self.reset()

    def reset(self) -> tuple[Observation, Info]:
        self.written: list[str] = []
        self.bonus = 0.0
        self._verdict: tuple[int, Verdict] | None = None
        info: Info = {"metrics": self.metrics_at_start()}
        if self.problem is None:
            return {}, info  # the prompt shows the problem
        return {"obs_str": self.problem.text, "multi_modal_data": {"image": [self.problem.image]}}, info

    def metrics_at_start(self) -> dict[str, float]:
        """Return the metrics of an episode that is cut off before its first answer."""
        return dict.fromkeys(VERDICT_METRICS, 0.0)

    def step(self, response_text: str) -> tuple[Observation, bool, Info]:
        self.written.append(response_text)
        verdict = self.verdict()
        if verdict.outcome != "no_answer":
            self.bonus = self.settings.format_reward
        metrics: dict[str, Any] = verdict_metrics(verdict) | {"turn_metrics": self.diagnosis(response_text)}
        info = {"reward": self.score() + self.bonus, "outcome": verdict.outcome, "metrics": metrics}
        return {"obs_str": "The answer has been taken."}, True, info

    def diagnosis(self, response_text: str) -> dict[str, bool]:
        """Return the turn's metrics for the setting `diagnostics`; empty without it."""
        if self.problem is None or not self.settings.diagnostics:
            return {}
        return read_accuracy(response_text, self.problem.numbers)

    def verdict(self) -> Verdict:
        """Return the verdict on all answers so far."""
        if self._verdict is None or self._verdict[0] != len(self.written):
            self._verdict = (len(self.written), self.grade("\n".join(map(without_thoughts, self.written))))
        return self._verdict[1]

    def score(self) -> float:
        """Return the verdict as a reward, by the reward model of the settings."""
        right = self.verdict().score
        if self.settings.reward_model == "default":
            return right
        return 0.9 * right + 0.1 * has_form("\n".join(self.written))

    def grade(self, text: str) -> Verdict:
        settings = self.settings
        return reward_function(
            text, self.label, tolerance=settings.tolerance, choices=self.choices, limit_s=settings.grade_limit_s
        )
