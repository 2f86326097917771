"""Plays a policy without training it, as a run plays its held-out samples, and tells how sure the result is:

    python launch/evaluate.py --config launch/recipes/R.toml --model runs/R/checkpoints/step_00000190
    python launch/evaluate.py --config R.toml --model MODEL_OR_CHECKPOINT --against OTHER [--samples N] [--repeats K]
    python launch/evaluate.py --config R.toml --api https://HOST/v1 --api-model NAME [--against CHECKPOINT]

It starts engines and actors on this machine as launch/local.py does. Some episodes are recorded for the dashboard. The
last line is one JSON object: `success` with its 95 % interval `low` and `high`, and all else that was measured.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if __name__ == "__main__":  # a Ctrl-C amid these imports waits: as an exception there it leaves a traceback or is lost
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))

import argparse
import itertools
import json
import os
from collections.abc import Sequence
from contextlib import nullcontext
from tempfile import TemporaryDirectory
from typing import Any

from launch.engines.host_engines import check_alone, check_host
from launch.evaluation.api_playing import ApiPolicy, api_policy, play_api, usage_in_words, usage_of
from launch.evaluation.evaluation_report import difference_of, failures_of, is_shown, lines_of, record_of
from launch.evaluation.playing import EvaluationFailed, play
from launch.evaluation.policies import Named, named
from launch.processes.actor_supervisor import ActorFailed
from launch.processes.children import run_program
from launch.processes.run_folder import write_recipe
from launch.task_samples import chosen_samples, ready
from launch.terminal.screen import Screen, is_terminal
from learner.metrics.evaluation_metrics import compared, evaluation_metrics
from learner.recording.recorder import Recorder
from learner.tickets.evaluations import EvaluationPlan
from learner.tickets.ticket_book import EvaluationResult
from shared.config.recipe import ConfigError, Recipe, fail, load, recipe_parser
from shared.engine.engine_api import EngineError
from shared.log import get_logger
from shared.types import Sample
from shared.util.own_commands import command
from shared.vision import VisionSpec

LOG = get_logger("evaluate")
LOOPBACK = "tcp://127.0.0.1:0"
RECORDER_S = 60.0  # time to write the last recordings


def main(argv: list[str] | None = None) -> int:
    options, overrides = command_line().parse_known_args(argv)
    recipe = load(options.config, [*overrides, *shorthands(options)])
    try:
        recipe, policies, samples = checked(recipe, options)
        with Screen() if is_terminal() else nullcontext() as screen:
            result = evaluate(recipe, policies, samples, options, screen)
    except ActorFailed as failure:
        LOG.error("%s", failure)
        return failure.code
    except (EngineError, EvaluationFailed, ValueError, OSError) as error:
        return fail(error)
    print(json.dumps(result), flush=True)
    return 0


def command_line() -> argparse.ArgumentParser:
    parser = recipe_parser(__doc__)
    add = parser.add_argument
    policy = "a checkpoint's folder, a model's, or a hub name"
    add("--model", default="", metavar="MODEL_OR_CHECKPOINT", help=f"{policy}; without it, model.path")
    add("--against", default="", metavar="OTHER", help=f"compare with this policy on the same samples: {policy}")
    add(
        "--dataset",
        default="",
        metavar="FILE",
        help="play this dataset (a .parquet or .jsonl file, a folder, a pattern) instead of the held-out samples",
    )
    add("--samples", metavar="N", help="samples to play; without it eval.samples, and all of a --dataset")
    add("--repeats", metavar="K", help="episodes of each sample; without it eval.repeats. Gives pass@k")
    add("--greedy", action="store_true", help="the likeliest token always; without it sampling.temperature")
    add("--api", default="", metavar="URL", help="the model of a server with OpenAI's API plays: https://HOST/v1")
    add("--api-model", default="", metavar="NAME", help="the model's name at that server")
    add(
        "--api-key-env",
        default="OPENAI_API_KEY",
        metavar="VARIABLE",
        help="environment variable with the API key; none is sent if it is not set",
    )
    add(
        "--api-price",
        nargs=2,
        type=float,
        metavar=("IN", "OUT"),
        help="dollars for a million tokens of prompts, and of answers",
    )
    add("--api-max-tokens", type=int, default=0, metavar="N", help="the most of one answer; without it env.turn_tokens")
    add("--api-concurrency", type=int, default=8, metavar="N", help="requests that are open at once")
    add("--api-timeout", type=float, default=300.0, metavar="SECONDS", help="the longest wait for one answer")
    add("--out", default="", metavar="FOLDER", help="where results go; without it RUN.DIR/evaluations/RUN.NAME-NUMBER")
    return parser


def shorthands(options: argparse.Namespace) -> list[str]:
    """Return the options that stand for recipe fields, as overrides."""
    given = {"--eval.samples": options.samples, "--eval.repeats": options.repeats}
    return [word for name, value in given.items() if value is not None for word in (name, value)]


def checked(recipe: Recipe, options: argparse.Namespace) -> tuple[Recipe, list[Named | ApiPolicy], list[Sample]]:
    """Return the recipe, changed to use only this machine, the policies, and the samples to play. Raise ValueError, in
    one line, for every mistake that can be found before anything heavy starts."""
    if recipe.engine.urls:
        raise ConfigError(
            "engine.urls is set, but an evaluation starts engines of its own; set it to [] or leave it out"
        )
    if options.greedy and options.repeats not in (None, "1"):
        raise ConfigError(
            f"--greedy --repeats {options.repeats}: greedy episodes of one sample are equal; leave one out"
        )
    policies = [first_policy(recipe, options)]
    policies += [named("--against", options.against, recipe)] if options.against else []
    actor = recipe.actor.model_copy(update={"learner": LOOPBACK})
    transport = recipe.transport.model_copy(update={"keys": ""})
    recipe = of_model(recipe.model_copy(update={"actor": actor, "transport": transport}), policies[0].folder)
    recipe = ready(recipe)
    if any(isinstance(policy, Named) for policy in policies):
        check_alone(recipe)
        check_host(recipe)
    count = recipe.eval.samples if options.samples is not None else None
    if options.dataset and count == 0:
        raise ConfigError("--samples 0: there is nothing to play")
    samples = chosen_samples(recipe, options.dataset, count)
    if count is not None and len(samples) < count:
        LOG.warning("there are %d samples, not %d", len(samples), count)
    return recipe, policies, samples


def first_policy(recipe: Recipe, options: argparse.Namespace) -> Named | ApiPolicy:
    """Return the policy of --api, of --model, or the recipe's. Raise ConfigError if there are two."""
    if not options.api:
        if options.api_model:
            raise ConfigError(f"--api-model {options.api_model}: give the server's address too, with --api URL")
        return named("--model" if options.model else "model.path", options.model or recipe.model.path, recipe)
    if options.model:
        raise ConfigError(f"--api {options.api} and --model {options.model}: give the second one as --against")
    return api_policy(
        options.api,
        options.api_model,
        options.api_key_env,
        options.api_max_tokens,
        options.api_concurrency,
        options.api_timeout,
        options.api_price,
        recipe,
    )


def played(
    recipe: Recipe,
    policy: Named | ApiPolicy,
    samples: Sequence[Sample],
    plan: EvaluationPlan,
    out: Path,
    screen: Screen | None,
    *,
    last: bool,
) -> EvaluationResult:
    """Play the samples with a policy. Raise EvaluationFailed, EngineError, ActorFailed or ValueError if it fails."""
    if isinstance(policy, ApiPolicy):
        return play_api(recipe, samples, plan, policy, screen.update if screen else LOG.info)
    with TemporaryDirectory(prefix=".weights-", dir=out) as weights:
        folder = policy.export(Path(weights), recipe.model.dtype)
        return play(of_model(recipe, folder), samples, plan, screen, last=last)


def evaluate(
    recipe: Recipe,
    policies: Sequence[Named | ApiPolicy],
    samples: Sequence[Sample],
    options: argparse.Namespace,
    screen: Screen | None,
) -> dict[str, Any]:
    """Play one policy after the other; return the summary to print. Each policy's results go into a folder that the
    dashboard shows as a run."""
    plan, out = EvaluationPlan.of(recipe, greedy=options.greedy), make_folder(recipe, options.out)
    results: list[EvaluationResult] = []
    records: list[dict[str, Any]] = []
    for policy, name in zip(policies, ("model", "against"), strict=False):
        LOG.info("%s plays %d samples %s", policy.given, len(samples), in_words(plan))
        (out / name).mkdir()
        own = of_model(recipe, policy.folder)  # the model's own folder, which stays after the evaluation
        own = own.model_copy(update={"run": own.run.model_copy(update={"dir": str(out), "name": name})})
        write_recipe(own, out / name)
        result = played(own, policy, samples, plan, out, screen, last=policy is policies[-1])
        record(own, result)
        results.append(result)
        usage = {"api": usage_of(result, policy)} if isinstance(policy, ApiPolicy) else {}
        records.append({"model": policy.given, **record_of(result), **usage, "folder": str(out / name)})
        # written now, in case the next policy fails
        (out / name / "result.json").write_text(json.dumps(records[-1], indent=2) + "\n")
        for line in lines_of(records[-1]):
            LOG.info("  %s", line)
        if isinstance(policy, ApiPolicy):
            LOG.info("  %s", usage_in_words(usage_of(result, policy)))
        for line in failures_of(result):
            LOG.warning("  %s", line)
    summary = {**records[0], "repeats": plan.repeats, "greedy": options.greedy}
    if len(results) > 1:
        summary |= {"against": records[1], "difference": difference(results, policies)}
    (out / "result.json").write_text(json.dumps(summary, indent=2) + "\n")
    LOG.info("episodes to look at: %s %s", command("dashboard"), out)
    return summary


def in_words(plan: EvaluationPlan) -> str:
    times = "once" if plan.repeats == 1 else f"{plan.repeats} times"
    return f"{times}, greedily" if not plan.sampling.temperature else f"{times}, at {plan.sampling.temperature:g}"


def of_model(recipe: Recipe, folder: str) -> Recipe:
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": folder})})


def make_folder(recipe: Recipe, out: str) -> Path:
    """Make the folder for results. Raise ConfigError if it exists and is not empty."""
    parent = Path(recipe.run.dir) / "evaluations"
    places = [Path(out)] if out else (parent / f"{recipe.run.name}-{number}" for number in itertools.count(1))
    folder = next((each for each in places if not each.exists() or (out and not any(each.iterdir()))), None)
    if folder is None:
        raise ConfigError(f"--out {out} is not empty: choose another folder")
    folder.mkdir(parents=True, exist_ok=bool(out))
    return folder


def record(recipe: Recipe, result: EvaluationResult) -> None:
    """Record some episodes for the dashboard: the worst and a few of the best."""
    model = recipe.model
    recorder = Recorder(recipe, VisionSpec.load(model.path, min_pixels=model.min_pixels, max_pixels=model.max_pixels))
    recorder.evaluation(result.name, 0, result, evaluation_metrics(result))
    recorder.close(RECORDER_S)


def difference(results: Sequence[EvaluationResult], policies: Sequence[Named | ApiPolicy]) -> dict[str, Any] | None:
    """Return and log the difference of two policies; None if no sample has an episode of both."""
    comparison = compared(*results)
    if comparison is None:
        LOG.warning("no sample has a sound episode of both policies: there is nothing to compare")
        return None
    record = difference_of(comparison)
    LOG.info("%s minus %s, on %d samples:", policies[0].given, policies[1].given, comparison.pairs)
    for line in lines_of(record, signed=True):
        LOG.info("  %s", line)
    verdict = "the policies differ" if is_shown(record) else "no difference of success is shown"
    LOG.info("better on %d samples, worse on %d: %s", comparison.better, comparison.worse, verdict)
    return record


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    run_program(main)
