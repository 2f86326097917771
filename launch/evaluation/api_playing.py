"""Plays an evaluation's samples with a model behind an API: the same samples, seeds and rewards as any policy's."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from launch.evaluation.playing import NAME, EvaluationFailed
from learner.tickets.evaluations import FIRST_SEED, EvaluationPlan
from learner.tickets.ticket_book import EvaluationResult
from shared.config.recipe import ConfigError, Recipe
from shared.config.tasks import tasks_of
from shared.engine.http_client import JsonClient
from shared.log import get_logger
from shared.types import Ending, Group, Sample, Ticket, Trajectory

LOG = get_logger("evaluate")
PROGRESS_S = 15.0
CLOSE_S = 3.0
PER = 1_000_000  # tokens that a price is for


@dataclass(frozen=True, slots=True)
class ApiPolicy:
    """A model that --api and --api-model name. `prices`: dollars for a million tokens of prompts, and of answers."""

    url: str
    model: str
    key: str
    max_tokens: int  # 0: env.turn_tokens
    concurrency: int
    timeout_s: float
    prices: Sequence[float] | None
    folder: str  # of the recipe's model, whose tokenizer writes the records

    @property
    def given(self) -> str:
        return f"{self.model} at {self.url}"

    def cost_of(self, prompt_tokens: float, answer_tokens: float) -> float | None:
        """Return the dollars for so many tokens; None without prices."""
        if self.prices is None:
            return None
        return (prompt_tokens * self.prices[0] + answer_tokens * self.prices[1]) / PER


def api_policy(
    url: str,
    model: str,
    key_env: str,
    max_tokens: int,
    concurrency: int,
    timeout_s: float,
    prices: Sequence[float] | None,
    recipe: Recipe,
) -> ApiPolicy:
    """Return the policy of the command line. Raise ConfigError, in one line, for a mistake that shows without a
    request."""
    parts = urlsplit(url)
    if "@" in parts.netloc or parts.query:
        raise ConfigError("--api: leave secrets out of the address; the key is read from --api-key-env")
    try:
        JsonClient(url)
    except ValueError as error:
        raise ConfigError(f"--api: {error}") from None
    if not model:
        raise ConfigError(f"--api {url}: say with --api-model which of its models plays")
    for name, value, least in (
        ("--api-max-tokens", max_tokens, 0),
        ("--api-concurrency", concurrency, 1),
        ("--api-timeout", timeout_s, 1),
    ):
        if value < least:
            raise ConfigError(f"{name} {value:g}: at least {least}")
    if prices is not None and min(prices) < 0:
        raise ConfigError(f"--api-price {prices[0]:g} {prices[1]:g}: at least 0")
    key = os.environ.get(key_env, "").strip()
    if key and not (key.isascii() and key.isprintable()):
        raise ConfigError(f"the key in {key_env} has characters that no key has")
    for task in tasks_of(recipe):
        rollout = task.recipe.rollout
        for field in ("path", "agent", "command", "listen"):
            if path := getattr(rollout, field):
                raise ConfigError(f"--api: rollout.{field} = {path!r} plays through an engine; leave one of them out")
    return ApiPolicy(url, model, key, max_tokens, concurrency, timeout_s, prices, recipe.model.path)


def play_api(
    recipe: Recipe, samples: Sequence[Sample], plan: EvaluationPlan, policy: ApiPolicy, show: Callable[[str], None]
) -> EvaluationResult:
    """Play the samples; return the result. Raise EvaluationFailed, in one line, if the server refuses such requests, or
    if more episodes fail than env.max_failure_share."""
    groups = asyncio.run(_play(recipe, samples, plan, policy, show))
    result = EvaluationResult(NAME, tuple(groups), {})
    episodes = [t for _, group in groups for t in group.trajectories]
    failed = [t for t in episodes if not t.trainable and t.ending is not Ending.OUT_OF_TOKENS]
    if episodes and len(failed) / len(episodes) > recipe.env.max_failure_share:
        first = failed[0]
        raise EvaluationFailed(
            f"{len(failed)} of {len(episodes)} episodes failed, more than env.max_failure_share = "
            f"{recipe.env.max_failure_share:g}; the first as {first.ending.value}: {first.error}"
        )
    return result


async def _play(
    recipe: Recipe, samples: Sequence[Sample], plan: EvaluationPlan, policy: ApiPolicy, show: Callable[[str], None]
) -> list[tuple[Ticket, Group]]:
    from actor.api_sampler import ApiModel, ApiRefused
    from actor.engine_pool import EnginePool
    from actor.worker import make_players
    from launch.task_samples import renderer_of

    most = policy.max_tokens or recipe.most_turn_tokens
    done, began, said = 0, time.monotonic(), time.monotonic()
    async with JsonClient(policy.url, connections=policy.concurrency, api_key=policy.key) as http:
        model = ApiModel(http, policy.model, policy.key, most, policy.timeout_s, policy.concurrency)
        players, processes = make_players(recipe, renderer_of(recipe), EnginePool([]), api=model)
        places = asyncio.Semaphore(policy.concurrency)

        async def episode(ticket: Ticket, index: int) -> Trajectory:
            nonlocal done, said
            async with places:
                played = await players.play(ticket, index)
            done += 1
            if time.monotonic() - said > PROGRESS_S:
                said = time.monotonic()
                show(f"{done} of {len(samples) * plan.repeats} episodes after {said - began:.0f} s")
            return played

        async def group(ticket: Ticket) -> tuple[Ticket, Group]:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(episode(ticket, index)) for index in range(plan.repeats)]
            return ticket, Group(ticket.id, "api", tuple(task.result() for task in running))

        tickets = [
            Ticket(f"{NAME}/{i}-api", sample, plan.repeats, 0, plan.sampling, 0.0, evaluation=NAME, seed=FIRST_SEED + i)
            for i, sample in enumerate(samples)
        ]
        try:
            async with asyncio.TaskGroup() as tasks:
                groups = [tasks.create_task(group(ticket)) for ticket in tickets]
        except BaseExceptionGroup as failures:
            if refused := failures.subgroup(ApiRefused):
                raise EvaluationFailed(str(_first(refused))) from None
            raise
        finally:
            await players.close(CLOSE_S)
            for each in processes:
                each.close()
        return [task.result() for task in groups]


def _first(group: BaseException) -> BaseException:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


def usage_of(result: EvaluationResult, policy: ApiPolicy) -> dict[str, float | None]:
    """Return what the whole evaluation has taken: requests, tokens, and dollars (None without prices)."""
    metrics = [t.metrics for _, group in result.groups for t in group.trajectories]
    names = ("api_requests", "prompt_tokens", "answer_tokens")
    totals = {name: sum(m.get(name, 0.0) for m in metrics) for name in names}
    return {**totals, "dollars": policy.cost_of(totals["prompt_tokens"], totals["answer_tokens"])}


def usage_in_words(usage: dict[str, float | None]) -> str:
    """Return one line of what `usage_of` counts."""
    tokens = f"{usage['prompt_tokens']:,.0f} tokens of prompts, {usage['answer_tokens']:,.0f} of answers"
    dollars = usage["dollars"]
    cost = "without --api-price IN OUT no cost is known" if dollars is None else f"${dollars:,.4f}"
    return f"{usage['api_requests']:,.0f} requests, {tokens}: {cost}"
