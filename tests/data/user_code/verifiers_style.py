"""Environments in the style of verifiers' interface up to 0.3: guess a number in three turns, and name a colour in one.

With the library installed they are its own classes; without it small ones that have the same methods."""

from __future__ import annotations

import base64
import inspect
import io

from PIL import Image

try:
    import verifiers as vf
    from datasets import Dataset

    MultiTurnEnv, SingleTurnEnv, Rubric = vf.MultiTurnEnv, vf.SingleTurnEnv, vf.Rubric

    def rows_of(rows):
        return Dataset.from_list(rows)

except ImportError:

    def rows_of(rows):
        return rows

    class Rubric:
        def __init__(self, funcs, weights=None):
            self.funcs, self.weights = funcs, weights or [1.0] * len(funcs)

        def _is_group_func(self, function):
            return "states" in inspect.signature(function).parameters

        async def score_rollout(self, state):
            objects = {"prompt": state["prompt"], "completion": state["completion"], "answer": state["answer"]}
            objects |= {"state": state, "info": state["info"]}
            values = []
            for function in self.funcs:
                named = {name: objects[name] for name in inspect.signature(function).parameters if name in objects}
                try:
                    value = function(**named)
                    values.append(float(await value if inspect.isawaitable(value) else value))
                except Exception:  # noqa: BLE001 - as the library does
                    values.append(0.0)
            state["metrics"] = {each.__name__: value for each, value in zip(self.funcs, values, strict=True)}
            state["reward"] = sum(value * weight for value, weight in zip(values, self.weights, strict=True))

    class MultiTurnEnv:
        def __init__(self, dataset, rubric, system_prompt=None, eval_dataset=None, max_turns=-1, **more):
            first = [{"role": "system", "content": system_prompt}] if system_prompt else []

            def formatted(rows):
                return [{"prompt": [*first, {"role": "user", "content": row["question"]}], **row} for row in rows]

            self.dataset = formatted(dataset)
            self.eval_dataset = formatted(eval_dataset) if eval_dataset else None
            self.rubric, self.max_turns = rubric, max_turns
            for name, value in more.items():
                setattr(self, name, value)

        async def setup_state(self, state):
            return state

        async def is_completed(self, state):
            return len(state["trajectory"]) >= self.max_turns > 0 or state.get("final_env_response") is not None

    class SingleTurnEnv(MultiTurnEnv):
        def __init__(self, **more):
            super().__init__(max_turns=1, **more)

        async def env_response(self, messages, state):
            raise NotImplementedError


def said(message):
    return message["content"] if isinstance(message, dict) else message.content


class Guess(MultiTurnEnv):
    async def setup_state(self, state):
        state["guesses"] = 0
        return state

    async def env_response(self, messages, state, **_):
        state["guesses"] += 1
        guess, number = int(said(messages[-1])), int(state["answer"])
        if guess == number:
            state["final_env_response"] = [{"role": "user", "content": "Right."}]
            return state["final_env_response"]
        image = io.BytesIO()
        Image.new("RGB", (8, 8), "red" if guess > number else "green").save(image, "PNG")
        url = "data:image/png;base64," + base64.b64encode(image.getvalue()).decode()
        text = "Lower." if guess > number else "Higher."
        picture = {"type": "image_url", "image_url": {"url": url}}
        return [{"role": "user", "content": [picture, {"type": "text", "text": text}]}]


async def right(completion, answer):
    spoken = [
        said(each) for each in completion if (each["role"] if isinstance(each, dict) else each.role) == "assistant"
    ]
    return float(spoken[-1] == answer)


def few(state):
    return 1.0 / (1 + len(state["trajectory"]))


def fails(answer):
    raise KeyError(answer)


def compares(states):
    return [0.0 for _ in states]


def load_environment(kind="guess", count=40, held_out=0, bad=""):
    rows = [{"question": f"Row {i}. Guess.", "answer": str(i % 10)} for i in range(count)]
    prompt = "Guess the number from 0 to 9."
    rubric = Rubric(funcs=[right, few], weights=[1.0, 0.1])
    if bad == "reward":
        rubric = Rubric(funcs=[right, fails])
    elif bad == "group":
        rubric = Rubric(funcs=[compares])
    elif bad == "load":
        raise OSError("no data")
    elif bad == "kind":
        return object()
    more = {"eval_dataset": rows_of(rows[:held_out])} if held_out else {}
    if kind == "single":
        return SingleTurnEnv(dataset=rows_of(rows), system_prompt=prompt, rubric=rubric, **more)
    env = Guess(dataset=rows_of(rows), system_prompt=prompt, rubric=rubric, max_turns=3, **more)
    if bad == "tools":
        env.tool_defs = [{"name": "look"}]
    return env
