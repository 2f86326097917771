r"""Geometry problems over several turns, with a tool that scores an answer before the model commits to it.

Each turn may call `calc_score`; the environment answers with the score and what to do next. A turn without a call ends
the episode, as does the last turn. What counts is the last \boxed{} the model wrote; the tool's score is not part of
the reward. `format_reward` is given once, for a call that could be executed.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import Field

from envs.base import Info, Observation
from envs.geo3k import Geo3kEnv, GeometrySettings, episode_reward, task_of, verdict_metrics
from envs.geometry.tool_call import ToolCall, parse_tool_call
from envs.geometry.triangles import Problem
from envs.math_grading.normalize import last_box, normalize
from envs.settings import read_settings

__all__ = ["SETTINGS", "SYSTEM_PROMPT", "build_env", "episode_reward"]

TOOLS = ("calc_score", "calc_geo3k_reward")
FORM = '<tool_call>{"name": "calc_score", "arguments": {"answer": "<digits>"}}</tool_call>'
FINAL_FORM = r"Answer: \boxed{$Answer}"
SYSTEM_PROMPT = (
    "Solve the geometry problem about the image. Reason inside <think> </think>. Before you finish, check your "
    f"answer with the tool calc_score at least once, written as {FORM} and use the score it returns to correct "
    f"yourself. Then end with the final answer in the form {FINAL_FORM}"
)


class ToolSettings(GeometrySettings):
    max_turns: int = Field(3, ge=1, description="set by env.max_turns")


SETTINGS = ToolSettings


def build_env(sample: Any = None, args: Any = None, **_: Any) -> Geo3kToolEnv:
    """The environment of a sample. ValueError if the sample has neither a label nor a seed, or max_turns is below 1."""
    settings = read_settings(ToolSettings, sample, args)
    return Geo3kToolEnv(*task_of(sample, settings), settings)


class Geo3kToolEnv(Geo3kEnv):
    """One problem with the scoring tool."""

    def __init__(self, label: str, problem: Problem | None, settings: ToolSettings) -> None:
        self.max_turns = settings.max_turns
        super().__init__(label, problem, settings)

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
        called = {"tool_call": float(call is not None), "tool_executed": float(info["tool_executed"])}
        metrics: dict[str, Any] = {
            "turn_metrics": called | self.diagnosis(response_text),
            "tool_used": float(self.num_executed > 0),
            "tool_score": info["score"] or 0.0,
            "tool_timeout": float(info["tool_timeout"]),
        }
        if done:
            verdict = self.verdict()
            metrics |= verdict_metrics(verdict)
            info["outcome"] = verdict.outcome
            earned += self.score()
        info |= {"reward": earned, "metrics": metrics}
        told = info | {key: _plain(info[key]) for key in ("name", "answer")}
        return {"obs_str": _FEEDBACK[info["feedback"]].format(**told), "tool_score": info["score"]}, done, info

    def _execute(self, call: ToolCall | None, turn: int) -> Info:
        info: Info = {
            "tool_call": call and {"name": call.name, "arguments": call.arguments},
            "tool_executed": False,
            "name": call and call.name,
            "answer": None,
            "score": None,
            "answer_missing": False,
            "tool_timeout": False,
        }
        if call is None:
            return info | {"feedback": "no_tool_call"}
        if call.name not in TOOLS:
            return info | {"feedback": "unsupported_tool"}
        answer = call.arguments.get("answer")
        text = "" if answer is None or isinstance(answer, (bool, dict, list)) else str(answer).strip()
        if not text:
            return info | {"feedback": "missing_answer", "answer_missing": True}
        score, timeout = self._score(text)
        feedback = "correct" if score else "wrong_final_warning" if turn >= self.max_turns - 2 else "wrong"
        executed = {"tool_executed": True, "answer": text, "score": score, "tool_timeout": timeout}
        return info | executed | {"feedback": feedback}

    def _score(self, answer: str) -> tuple[float, bool]:
        """The tool's score, and whether grading took too long. An integer is not met by a fraction left to reduce."""
        if re.fullmatch(r"-?\d+", normalize(self.label)) and re.search(r"\\[dtc]?frac|\d\s*/\s*\d", answer):
            return 0.0, False
        boxed = answer if last_box(answer) is not None else rf"\boxed{{{answer}}}"
        verdict = self.grade(boxed)
        return verdict.score, verdict.outcome == "timeout"


def _plain(text: str | None) -> str | None:
    """What a model wrote, to be shown to it: what spells a control token, as <|im_end|>, would become one."""
    return text and re.sub(r"<\|(.*?)\|>", r"<\1>", text)


_FORM = FORM.replace("{", "{{").replace("}", "}}")
_FINAL = FINAL_FORM.replace("{", "{{").replace("}", "}}")
_WRONG = "calc_score: {score:.1f}. The answer {answer!r} is wrong. Reason in a different way and do not repeat it."
_FEEDBACK = {
    "no_tool_call": "There is no tool call, so the episode ends here.",
    "unsupported_tool": f"The tool {{name!r}} is not supported. The right form of a call is {_FORM}",
    "missing_answer": f"The answer is missing, so nothing was scored. The right form of a call is {_FORM}",
    "correct": "calc_score: {score:.1f}. The answer {answer!r} is correct. Stop reasoning and give the final answer in "
    "\\boxed{{}}.",
    "wrong": _WRONG,
    "wrong_final_warning": f"{_WRONG} You have only one chance left to answer: make no more tool calls and give the "
    f"final answer in the form {_FINAL}",
}
