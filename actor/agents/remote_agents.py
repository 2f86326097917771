"""Agents elsewhere: programs in containers or on other machines that lease an episode over HTTP, play it through its
base URL with any client, and post its reward.

    POST /lease  {"wait_s": 30}          -> {"base_url", "sample", "args", "evaluation", "lease_s", "timeout_s"}, or 204
    POST {base_url}/result  {"reward": 1.0, "metrics": {...}, "success": true}   or   {"error": "why"}

An episode is leased once, and its first valid result is the one that counts. Any call to its base URL renews the lease.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from actor.agents.dialogues import Refused, invalid
from actor.rewards import BadReward, image_uri, number_or_turns
from envs.messages import split_images
from shared.types import Sample, Ticket
from shared.util.user_errors import in_words

WAIT_S, MAX_WAIT_S = 30.0, 60.0  # how long a request for a lease waits for an episode
MAX_ERROR = 1000  # characters of an agent's own error that are kept
RESULT_FIELDS = {"reward", "metrics", "success", "error"}


class AgentFailed(Exception):
    """What an agent in another process says has gone wrong, or how that process has failed."""


@dataclass(frozen=True, slots=True)
class Reported:
    """What an agent in another process has given at the end: its reward, or one for each answer of the policy. `why`:
    why it gives none, where that is not its own word."""

    reward: float | tuple[float, ...] | None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    why: str = "the agent's reward is null"


class PostedResults:
    """The results that agents post, by the secret in the base URL of their episode."""

    def __init__(self) -> None:
        self._expected: dict[str, asyncio.Future[Reported]] = {}

    def expect(self, secret: str) -> asyncio.Future[Reported]:
        """Return what will be posted about an episode. Nothing is taken any more when that is there, or cancelled."""
        expected = self._expected[secret] = asyncio.get_running_loop().create_future()
        expected.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # retrieved by nobody else
        expected.add_done_callback(lambda _: self._expected.pop(secret, None))
        return expected

    def report(self, secret: str, given: Mapping[str, Any]) -> bool:
        """Take what an agent has posted about its episode; return False if the episode has ended, or has a result.
        Raise Refused for a result of another form, which leaves the episode as it is."""
        outcome, expected = result_in(given), self._expected.get(secret)
        if expected is None or expected.done():
            return False
        if isinstance(outcome, AgentFailed):
            expected.set_exception(outcome)
        else:
            expected.set_result(outcome)
        return True


class RemoteCall:
    """One episode that an agent elsewhere plays. `leased` is set when one has it; `waiting` has what it posts."""

    def __init__(self, secret: str, ticket: Ticket, args: Mapping[str, Any], waiting: asyncio.Future[Reported]) -> None:
        self.secret, self._ticket, self._args, self.waiting = secret, ticket, args, waiting
        self.leased = asyncio.Event()

    def give_up(self) -> None:
        """Take no result any more."""
        self.waiting.cancel()

    def described(self) -> dict[str, Any]:
        """Return the episode as its agent gets it."""
        return episode_as_json(self._ticket, self._args)


class RemoteAgents:
    """The episodes that agents elsewhere are to play: those that wait for one, and the results of those that are being
    played."""

    def __init__(self) -> None:
        self.results = PostedResults()
        self._waiting: asyncio.Queue[RemoteCall] = asyncio.Queue()

    def offer(self, secret: str, ticket: Ticket, args: Mapping[str, Any]) -> RemoteCall:
        """Offer an episode to whoever asks for one next."""
        call = RemoteCall(secret, ticket, args, self.results.expect(secret))
        self._waiting.put_nowait(call)
        return call

    async def lease(self, wait_s: float) -> RemoteCall | None:
        """Return the episode that has waited longest, as soon as there is one; None if there is none within the
        time."""
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    call = await self._waiting.get()
                    if not call.waiting.done():
                        call.leased.set()
                        return call
        except TimeoutError:
            return None


def wait_in(given: Mapping[str, Any]) -> float:
    """Return how long a request for a lease waits. Raise Refused for what is no time."""
    if unknown := sorted(set(given) - {"wait_s"}):
        raise invalid(
            f"the field {in_words(unknown[0])} is not known; a request for a lease has wait_s", "unknown_field"
        )
    wait_s = given.get("wait_s", WAIT_S)
    if isinstance(wait_s, bool) or not isinstance(wait_s, int | float) or not 0 <= wait_s <= MAX_WAIT_S:
        raise invalid(f"wait_s = {in_words(wait_s)}: send seconds from 0 to {MAX_WAIT_S:g}")
    return float(wait_s)


def result_in(given: Mapping[str, Any]) -> Reported | AgentFailed:
    """Return what a posted result says. Raise Refused for one of another form."""
    if unknown := sorted(set(given) - RESULT_FIELDS):
        known = ", ".join(sorted(RESULT_FIELDS))
        raise invalid(f"the field {in_words(unknown[0])} is not known; a result has {known}", "unknown_field")
    if (error := given.get("error")) is not None:
        if not isinstance(error, str) or not error or given.get("reward") is not None:
            raise invalid(f"error = {in_words(error)}: send a text, and no reward", "invalid_result")
        return AgentFailed(f"the agent reports: {error[:MAX_ERROR]}")
    if "reward" not in given:
        raise invalid(
            "the result has no reward: send a number, a list of one for each answer, or null for the recipe's other "
            "reward",
            "invalid_result",
        )
    metrics, success = given.get("metrics"), given.get("success")
    metrics = {} if metrics is None else metrics
    if not isinstance(metrics, dict):
        raise invalid(f"metrics = {in_words(metrics)}: send an object of numbers", "invalid_result")
    if success is not None and not isinstance(success, bool):
        raise invalid(f"success = {in_words(success)}: send true or false", "invalid_result")
    succeeded = {} if success is None else {"success": float(success)}
    try:
        reward = None if given["reward"] is None else number_or_turns(given["reward"])
    except BadReward as error:
        raise invalid(str(error), "invalid_reward") from None
    return Reported(reward, {**metrics, **succeeded})


def episode_as_json(ticket: Ticket, args: Mapping[str, Any]) -> dict[str, Any]:
    """Return an episode as an agent in another process gets it."""
    return {"sample": sample_as_json(ticket.sample), "args": dict(args), "evaluation": ticket.evaluation}


def sample_as_json(sample: Sample) -> dict[str, Any]:
    """Return a sample for an agent in another process. `prompt` has the form of OpenAI's API, ready to be sent; its
    images, and those in `images`, are data URIs."""
    uris = [image_uri(image) for image in sample.images]
    plain, _ = split_images(sample.prompt, iter(sample.images))
    left = iter(uris)
    prompt = [
        {**message, "content": [_part(part, left) for part in message["content"]]}
        if not isinstance(message["content"], str)
        else message
        for message in plain
    ]
    return {
        "id": sample.id,
        "prompt": prompt,
        "images": uris,
        "label": sample.label,
        "metadata": sample.metadata,
        "tools": list(sample.tools),
        "task": sample.task,
    }


def _part(part: Mapping[str, Any], uris: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": next(uris)}} if part["type"] == "image" else dict(part)


def unauthorised() -> Refused:
    return Refused(401, "invalid_api_key", "a lease needs the key of rollout.api_key_file: Authorization: Bearer KEY")
