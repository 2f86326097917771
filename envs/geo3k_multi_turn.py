r"""Geometry problems over several turns, with a tool that scores an answer before the model gives its final one.

Each turn may call `calc_score`; the environment answers with the score and what to do next, or with the right form if a
call was begun that cannot be read. A turn without a call ends the episode, as does the last turn. What counts is the
last \boxed{} the model wrote; the tool's score is not part of the reward. `format_reward` is given once, for a call
that could be executed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pydantic import Field

from envs.base import Info, Observation
from envs.env_settings import read_settings
from envs.geo3k import Geo3kEnv, GeometrySettings, choices_of, episode_reward, task_of, verdict_metrics
from envs.geometry.triangles import Problem
from envs.math_grading.normalize import last_box, normalize
from envs.tools.tool import (
    BAD_ARGUMENTS,
    MALFORMED,
    UNKNOWN,
    BadArguments,
    Tool,
    ToolBox,
    ToolContext,
    ToolFault,
    ToolResult,
)
from envs.tools.tool_call import MalformedCall, ToolCall, parse_tool_call
from shared.families.marks import CALL, THOUGHT
from shared.util.user_errors import text_of

__all__ = ["GRADES_MATHEMATICS", "SETTINGS", "SYSTEM_PROMPT", "build_env", "episode_reward"]

NAMES = ("calc_score", "calc_geo3k_reward")
DESCRIPTION = "Score an answer."
PARAMETERS = {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}
FORM = CALL.around('{"name": "calc_score", "arguments": {"answer": "<digits>"}}')
FINAL_FORM = r"Answer: \boxed{$Answer}"
SYSTEM_PROMPT = (
    f"Solve the geometry problem about the image. Reason inside {THOUGHT.around(' ')}. Before you finish, check your "
    f"answer with the tool calc_score at least once, written as {FORM} and use the score it returns to correct "
    f"yourself. Then end with the final answer in the form {FINAL_FORM}"
)


class ToolSettings(GeometrySettings):
    max_turns: int = Field(3, ge=1, description="set by env.max_turns")


SETTINGS = ToolSettings
GRADES_MATHEMATICS = True


def build_env(sample: Any = None, args: Any = None, **_: Any) -> Geo3kToolEnv:
    """Return the environment of a sample. Raise ValueError if the sample has neither a label nor a seed, or if
    max_turns is below 1."""
    settings = read_settings(ToolSettings, sample, args)
    return Geo3kToolEnv(*task_of(sample, settings), settings, choices_of(sample))


class Geo3kToolEnv(Geo3kEnv):
    """One problem with the scoring tool."""

    def __init__(
        self, label: str, problem: Problem | None, settings: ToolSettings, choices: Sequence[str] = ()
    ) -> None:
        self.max_turns = settings.max_turns
        self.box = ToolBox(Tool(name, DESCRIPTION, PARAMETERS, self._calc_score) for name in NAMES)
        super().__init__(label, problem, settings, choices)

    def reset(self) -> tuple[Observation, Info]:
        self.num_executed = 0
        return super().reset()

    def step(self, response_text: str) -> tuple[Observation, bool, Info]:
        turn = len(self.written)
        self.written.append(response_text)
        call = parse_tool_call(response_text)
        info = self._execute(call, turn)
        self.num_executed += info["tool_executed"]
        earned = 0.0
        if info["tool_executed"] and not self.bonus:
            earned = self.bonus = self.settings.format_reward
        done = call is None or turn + 1 >= self.max_turns
        called = {
            "tool_call": float(call is not None),
            "tool_executed": float(info["tool_executed"]),
            "tool_malformed": float(isinstance(call, MalformedCall)),
        }
        metrics: dict[str, Any] = {
            "turn_metrics": called | self.diagnosis(response_text),
            "tool_used": float(self.num_executed > 0),
            "tool_score": info["score"] or 0.0,
            "tool_timeout": float(info["tool_timeout"]),
        }
        verdict = self.verdict()  # in every turn: the next answer may be cut off
        metrics |= verdict_metrics(verdict)
        if done:
            info["outcome"] = verdict.outcome
            earned += self.score()
        info |= {"reward": earned, "metrics": metrics}
        return {"obs_str": _FEEDBACK[info["feedback"]].format(**info), "tool_score": info["score"]}, done, info

    def metrics_at_start(self) -> dict[str, float]:
        return super().metrics_at_start() | dict.fromkeys(("tool_used", "tool_score", "tool_timeout"), 0.0)

    def _execute(self, call: ToolCall | MalformedCall | None, turn: int) -> Info:
        readable = call if isinstance(call, ToolCall) else None
        info: Info = {
            "tool_call": readable and {"name": readable.name, "arguments": readable.arguments},
            "tool_executed": False,
            "name": readable and readable.name,
            "answer": None,
            "score": None,
            "answer_missing": False,
            "tool_timeout": False,
        }
        if call is None:
            return info | {"feedback": "no_tool_call"}
        result = self.box.run(call, ToolContext())
        if result.error:
            return info | {"feedback": _REFUSED[result.error], "answer_missing": result.error == BAD_ARGUMENTS}
        text, score, timeout = result.value
        feedback = "correct" if score else "wrong_final_warning" if turn >= self.max_turns - 2 else "wrong"
        executed = {"tool_executed": True, "answer": text, "score": score, "tool_timeout": timeout}
        return info | executed | {"feedback": feedback}

    def _calc_score(self, arguments: dict[str, Any], context: ToolContext) -> ToolResult:
        """Return (the answer, its score, whether grading took too long) as the result's value."""
        answer = next((value for key, value in arguments.items() if key.strip().lower() == "answer"), None)
        if isinstance(answer, list) and len(answer) == 1:
            answer = answer[0]
        text = "" if answer is None or isinstance(answer, (bool, dict, list)) else str(answer).strip()
        if not text:
            raise BadArguments("the answer is missing")
        try:
            return ToolResult(value=(text, *self._score(text)))
        except Exception as error:
            raise ToolFault(f"the answer cannot be graded: {text_of(error)}") from error

    def _score(self, answer: str) -> tuple[float, bool]:
        """Return (the tool's score, whether grading took too long). If the label is an integer, an answer with a
        fraction scores 0."""
        if re.fullmatch(r"-?\d+", normalize(self.label)) and re.search(r"\\[dtc]?frac|\d\s*/\s*\d", answer):
            return 0.0, False
        boxed = answer if last_box(answer) is not None else rf"\boxed{{{answer}}}"
        verdict = self.grade(boxed)
        return verdict.score, verdict.outcome == "timeout"


_FORM = FORM.replace("{", "{{").replace("}", "}}")
_FINAL = FINAL_FORM.replace("{", "{{").replace("}", "}}")
_REFUSED = {UNKNOWN: "unsupported_tool", MALFORMED: "malformed_call", BAD_ARGUMENTS: "missing_answer"}
_WRONG = "calc_score: {score:.1f}. The answer {answer!r} is wrong. Reason in a different way and do not repeat it."
_FEEDBACK = {
    "no_tool_call": "There is no tool call, so the episode ends here.",
    "malformed_call": f"The tool call cannot be read, so nothing was scored. The right form of a call is {_FORM}",
    "unsupported_tool": f"The tool {{name!r}} is not supported. The right form of a call is {_FORM}",
    "missing_answer": f"The answer is missing, so nothing was scored. The right form of a call is {_FORM}",
    "correct": "calc_score: {score:.1f}. The answer {answer!r} is correct. Stop reasoning and give the final answer in "
    "\\boxed{{}}.",
    "wrong": _WRONG,
    "wrong_final_warning": f"{_WRONG} You have only one chance left to answer: make no more tool calls and give the "
    f"final answer in the form {_FINAL}",
}
