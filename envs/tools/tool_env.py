"""An environment in which the model calls tools until it gives its answer.

    TOOLS = [zoom, look_up]                     # in the module: the chat template tells the model of them

    class Reading(ToolEnv):
        def grade(self, answer):
            return float(self.sample.label in answer)

    def build_env(sample=None, args=None, **_):
        return Reading(sample, TOOLS)

An answer with calls is answered by one message of the role `tool` for each; an answer without any is the last.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from envs.base import Env, Info, Observation
from envs.env_calls import images_of
from envs.tools.tool import ERRORS, ToolBox, ToolContext, ToolResult, ToolSource, images_of_sample
from envs.tools.tool_call import parse_tool_calls
from shared.types import Sample

MAX_CALLS = 8  # of one turn that are run


class ToolEnv(Env):
    """One task with tools. A subclass has `grade`, and `first` if the sample's prompt does not show the task."""

    def __init__(self, sample: Sample | None, tools: Iterable[ToolSource]) -> None:
        """Raise ValueError for a tool of which a model could not be told."""
        self.sample = sample
        self.box = ToolBox(tools)
        self.context = ToolContext(sample)
        self.counts: Counter[str] = Counter()

    @abstractmethod
    def grade(self, answer: str) -> float | Info:
        """Return the reward of the last answer, or an info with "reward" and "metrics"."""

    def first(self) -> Observation:
        """Return the first observation; {} if the sample's prompt shows the task."""
        return {}

    def reset(self) -> tuple[Observation, Info]:
        observation = self.first()
        images = [*images_of_sample(self.sample), *images_of(observation)]
        self.context, self.counts = ToolContext(self.sample, images), Counter()
        return observation, {"metrics": self.metrics()}

    def step(self, response_text: str) -> tuple[Observation, bool, Info]:
        calls = parse_tool_calls(response_text, MAX_CALLS + 1)
        if not calls:
            graded = self.grade(response_text)
            info: Info = {**graded} if isinstance(graded, Mapping) else {"reward": graded}
            return {}, True, info | {"metrics": self.metrics() | dict(info.get("metrics") or {})}
        results = []
        for call in calls[:MAX_CALLS]:
            result = self.box.run(call, self.context)
            self.context.images += result.images
            self.counts[result.error or "executed"] += 1
            results.append(result)
        if len(calls) > MAX_CALLS:
            results.append(ToolResult(f"Error: only the first {MAX_CALLS} calls of a turn are run"))
        images = [image for result in results for image in result.images]
        observation = {"multi_modal_data": {"image": images}, "results": results}
        return observation, False, {"reward": 0.0, "metrics": self.metrics()}

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the episode so far: its calls, and how many of them ended in an error of each kind."""
        errors = {f"tool_{kind}": float(self.counts[kind]) for kind in ERRORS}
        return {"tool_calls": float(self.counts.total()), "tool_executed": float(self.counts["executed"])} | errors

    def format_observation(self, observation: Observation) -> Any:
        """Return the results of a turn's calls as messages of the role `tool`, each with its images before its text."""
        results = observation.get("results")
        if results is None:
            return super().format_observation(observation)
        return [message_of_result(result) for result in results]


def message_of_result(result: ToolResult) -> dict[str, Any]:
    """Return a result as a message: a text alone, or images (the observation's next ones) and the text."""
    if not result.images:
        return {"role": "tool", "content": result.text}
    content: list[dict[str, Any]] = [{"type": "image"} for _ in result.images]
    return {"role": "tool", "content": [*content, *([{"type": "text", "text": result.text}] if result.text else [])]}
