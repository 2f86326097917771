"""Will the learner fit, and how long will a step take? From a model's sizes alone: no weights, no GPU.

Prints the bytes of a GPU and of a host by kind, the seconds of a step and of a publication, and what they assume.

    python -m learner.plan --model Qwen3-VL-8B --gpus 8 --gpu-memory 141 [--section.key VALUE ...]
    python -m learner.plan --config launch/recipes/geo3k.toml --gpus 8 [--section.key VALUE ...]
    python -m learner.plan --page docs/figures/hardware.md

`launch/run.py TASK --dry-run` also divides the GPUs between learner and engines, by the same plan.
"""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from pathlib import Path

from learner.plan.divisors import next_divisors
from learner.plan.duration import Speed
from learner.plan.fit import check_context, check_experts, setting_of
from learner.plan.hardware_page import page
from learner.plan.machines import ASSUMED_KIND, GPU_KINDS, machine
from learner.plan.memory_use import Setting
from learner.plan.plan_report import compare_meshes, report_learner
from shared.config.recipe import ConfigError, Recipe, fail, load, recipe_parser
from shared.families.model_sizes import ModelSizes
from shared.families.registry import PUBLISHED, find_sizes
from shared.util.own_commands import called_as

ASSUMED = str(Path(__file__).with_name("assumed.toml"))
UNITS = ", ".join(field.name for field in fields(Speed))


def plan_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's own options; all other options are fields of the recipe."""
    parser = recipe_parser(__doc__, required=False)
    parser.prog = called_as("python -m learner.plan")
    parser.add_argument("--model", default="", help=f"a folder, or {', '.join(PUBLISHED)}; left out: all of these")
    parser.add_argument("--gpus", type=int, default=1, help="ranks of the learner")
    parser.add_argument(
        "--gpu", choices=GPU_KINDS, default="", help="kind of GPU: its memory and what is assumed of it"
    )
    parser.add_argument("--gpu-memory", type=float, default=0, help="of one GPU, in GB; the kind's, or an H100's 80")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="that share a host; 8")
    parser.add_argument("--host-memory", type=float, default=0, help="of one host, in GB; 0: not judged")
    parser.add_argument("--longest", type=int, default=0, help="tokens of the longest episode: compare meshes for it")
    parser.add_argument("--episode-tokens", type=int, default=0, help="of a mean episode; half of model.max_context")
    parser.add_argument("--assume", nargs="+", default=[], metavar="NAME=VALUE", help=f"of a GPU: {UNITS}")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write docs/figures/hardware.md")
    return parser


def assumed_speed(speed: Speed, words: list[str]) -> Speed:
    """Return `speed` changed by the `NAME=VALUE` words. Raise ConfigError for an unknown name or a value that is not a
    positive number."""
    names = [field.name for field in fields(Speed)]
    changes = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in names:
            raise ConfigError(f"--assume {word}: known are {', '.join(names)}")
        try:
            changes[name] = float(value)
        except ValueError:
            raise ConfigError(f"--assume {word}: write NAME=NUMBER") from None
        if not changes[name] > 0:
            raise ConfigError(f"--assume {word}: it must be above 0")
    return replace(speed, **changes)


def check_options(options: argparse.Namespace, setting: Setting) -> None:
    """Raise ValueError, with the nearest values that fit, for impossible numbers of GPUs, bytes or tokens."""
    if min(options.gpus, options.gpus_per_node, setting.shards) < 1:
        raise ConfigError("--gpus, --gpus-per-node and learner.parallel.shard_size count GPUs: at least 1")
    if min(options.gpu_memory, options.host_memory, options.longest, options.episode_tokens) < 0:
        raise ConfigError("--gpu-memory, --host-memory, --longest and --episode-tokens: at least 0")
    all_gpus = f"--gpus {setting.gpus}"
    for field, value, total, words in (
        ("shard_size", setting.shards, setting.gpus, all_gpus),
        ("context", setting.context, setting.gpus, all_gpus),
        ("expert", setting.expert, setting.shards, f"the {setting.shards} GPUs of a copy"),
    ):
        if total % value:
            cure = f"set it to {next_divisors(value, total)}"
            raise ConfigError(f"learner.parallel.{field} = {value} does not divide {words}; {cure}")


def setting_for(recipe: Recipe, sizes: ModelSizes, options: argparse.Namespace, gpu_bytes: float) -> Setting:
    """Return the setting for the plan of one model. Raise ValueError for options that the model does not allow."""
    setting = replace(setting_of(recipe, options.gpus, gpu_bytes), gpus_per_node=options.gpus_per_node)
    if options.episode_tokens:
        setting = replace(setting, episode_tokens=options.episode_tokens)
    check_options(options, setting)
    name = recipe.model.path
    check_experts(name, sizes, setting.expert, setting.shards)
    check_context("model.max_context", recipe.model.max_context, name, sizes)
    check_context("--longest", options.longest, name, sizes)
    check_context("--episode-tokens", options.episode_tokens, name, sizes)
    return setting


def main(argv: list[str] | None = None) -> int:
    """Print a plan, or write the page. Return 1 if a learner does not fit, 2 for an error in the options."""
    options, overrides = plan_parser().parse_known_args(argv)
    if options.page:
        options.page.write_text(page(), encoding="utf-8")
        return 0
    recipe = load(options.config or ASSUMED, overrides)
    names = [options.model or recipe.model.path]
    if not options.model and not options.config:
        names = [*PUBLISHED]
    host = machine(options.gpu) if options.gpu else None
    gpu_bytes = options.gpu_memory * 1e9 or (host.gpu_bytes if host else machine(ASSUMED_KIND).gpu_bytes)
    texts, fitting = [], True
    try:
        speed = assumed_speed(host.speed if host else Speed(), options.assume)
        for name in names:
            sizes = find_sizes(name)
            context = recipe.model.max_context
            if not options.config and "--model.max_context" not in " ".join(overrides):
                context = min(context, sizes.max_context)
            model = recipe.model.model_copy(update={"path": name, "max_context": context})
            setting = setting_for(recipe.model_copy(update={"model": model}), sizes, options, gpu_bytes)
            if options.longest:
                texts.append(compare_meshes(name, sizes, setting, options.longest, gpu_bytes, speed))
                continue
            text, fits = report_learner(
                name, sizes, setting, gpu_bytes, options.host_memory * 1e9, speed, longest=context
            )
            texts.append(text)
            fitting = fitting and fits
    except ValueError as error:
        return fail(error)
    print("\n\n".join(texts))
    return 0 if fitting else 1
