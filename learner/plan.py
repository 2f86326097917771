"""Will it fit, and how long will it take? From a model's sizes alone: no weights, no GPU.

Bytes of a GPU and of a node's host by kind; seconds of a step and of a publication, with what they assume.
python -m learner.plan --model Qwen3-VL-8B --gpus 8 --gpu-memory 141
python -m learner.plan --config launch/recipes/geo3k.toml --gpus 8 [--section.key VALUE ...]
python -m learner.plan --model Qwen3-VL-8B --gpus 64 --split    of these GPUs, how many for learner and engines
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import get_args

from learner.model.duration import FLOAT32_TAKES, Speed, publication_time, step_time
from learner.model.memory import DTYPE_BYTES, FP32, Memory, Setting, host_memory, memory
from learner.model.sizes import PUBLISHED, ModelSizes, find, sizes_of
from learner.parallel.choice import choices
from learner.parallel.cures import cure, host_cure
from learner.parallel.divisors import check_deal, next_divisors
from learner.scale import split
from shared.config import Recipe, fail, load, recipe_parser
from shared.settings.lora import Target

RESERVED_FRACTION = 0.06  # of a GPU: context, communication buffers, what the allocator cannot use


def check(sizes: ModelSizes, setting: Setting, gpu_bytes: float, name: str, longest: int = 0) -> Memory:
    """ValueError, with the numbers and what would help, if it does not fit. `longest`: tokens of the longest episode,
    0 where that is not known."""
    need = memory(sizes, setting)
    room = gpu_bytes * (1 - RESERVED_FRACTION)
    if need.total > room:
        parts = ", ".join(f"{kind} {size / 1e9:.1f}" for kind, size in need.kinds.items() if size >= 5e7)
        raise ValueError(
            f"{name} does not fit: a rank needs {need.total / 1e9:.1f} GB ({parts}), a GPU of {gpu_bytes / 1e9:.0f} GB "
            f"has room for {room / 1e9:.1f}; {cure(sizes, setting, room, longest)}"
        )
    return need


def check_recipe(recipe: Recipe, num_ranks: int, gpu_bytes: float | None) -> None:
    """Before anything is loaded. ValueError: a context longer than the model's, experts that cannot be dealt so, and
    with `gpu_bytes` what cannot fit.

    A model whose sizes are not known here passes.
    """
    file = Path(path := recipe.model.path) / "config.json"
    config = json.loads(file.read_text()) if file.exists() else {}
    sizes = sizes_of(config)
    if sizes is None:
        return
    if recipe.model.max_context > sizes.max_context:
        raise ValueError(
            f"model.max_context = {recipe.model.max_context} is longer than the context of {path}, which is "
            f"{sizes.max_context} tokens; set it to {sizes.max_context} at most"
        )
    _check_experts(config["model_type"], sizes, recipe.learner.parallel.expert, _shards(recipe, num_ranks))
    if gpu_bytes is not None:
        check(sizes, setting_of(recipe, num_ranks, gpu_bytes), gpu_bytes, path, recipe.model.max_context)


def _shards(recipe: Recipe, num_ranks: int) -> int:
    return recipe.learner.parallel.shard_size or num_ranks


def _check_experts(name: str, sizes: ModelSizes, expert: int, shards: int) -> None:
    """Numbers of ranks that `expert` does not divide are refused elsewhere; the rest is judged without them."""
    if expert > 1:
        ranks = shards if shards % expert == 0 else expert
        check_deal(expert, name, sizes.num_experts, sizes.expert_rows, ranks)


def setting_of(recipe: Recipe, num_ranks: int, gpu_bytes: float) -> Setting:
    """What a recipe's run on that many GPUs depends on."""
    setting = _as_written(recipe, num_ranks, gpu_bytes)
    return replace(setting, microbatch_tokens=_microbatch(setting, recipe.model.max_context))


def _microbatch(setting: Setting, longest: int) -> int:
    """Tokens of one on each of its ranks, which hold the longest episode together."""
    return max(setting.microbatch_tokens, -(-longest // setting.context))


def _as_written(recipe: Recipe, num_ranks: int, gpu_bytes: float) -> Setting:
    objective, optimizer, parallel = recipe.learner.objective, recipe.learner.optimizer, recipe.learner.parallel
    return Setting(
        gpus=num_ranks,
        shard_size=parallel.shard_size,
        dtype_bytes=DTYPE_BYTES[recipe.model.dtype],
        context=parallel.context,
        expert=parallel.expert,
        microbatch_tokens=parallel.microbatch_tokens,
        logits_bytes=0.1 * gpu_bytes,
        activation_checkpointing=parallel.activation_checkpointing,
        offload=parallel.offload,
        reference=objective.has_reference,
        optimizer=optimizer.name,
        freeze=optimizer.freeze,
        freeze_layers=optimizer.freeze_layers,
        lora_rank=recipe.learner.lora.rank or 0,
        lora_targets=recipe.learner.lora.targets,
        lora_publish=recipe.learner.lora.publish,
        episodes=recipe.learner.groups_per_step * recipe.learner.group_size,
        episode_tokens=recipe.model.max_context // 2,
        passes=objective.passes,
        deals=objective.passes + 1 if objective.minibatches > 1 else 1,
        steps_held=(recipe.learner.max_staleness + 1) * recipe.learner.publish.every,
        copies_checkpoint=recipe.learner.checkpoint.in_background,
    )


def report(
    name: str,
    sizes: ModelSizes,
    setting: Setting,
    gpu_bytes: float,
    host_bytes: float = 0.0,
    speed: Speed | None = None,
    longest: int = 0,
) -> tuple[str, bool]:
    """A table for people, and whether it fits. `host_bytes` of a node; 0: not judged. `longest`: see `check`."""
    need, host, room = memory(sizes, setting), host_memory(sizes, setting), gpu_bytes * (1 - RESERVED_FRACTION)
    parts = {"text": sizes.text_parameters, "vision": sizes.vision_parameters, "projector": sizes.projector_parameters}
    parts |= {"of the text, experts": sizes.expert_parameters} if sizes.num_experts else {}
    lines = [f"{name}: {sizes.parameters / 1e9:.3f} B parameters"]
    lines[0] += f" ({', '.join(f'{part} {count / 1e9:.3f}' for part, count in parts.items())})"
    lines.append(
        f"{setting.gpus} GPUs of {gpu_bytes / 1e9:.0f} GB, {setting.shards} a copy; "
        f"{setting.microbatch_tokens * setting.context} tokens a microbatch, {setting.visual_share:.0%} of them images"
    )
    if setting.context > 1:
        lines[-1] += f"; {setting.context} GPUs share each"
    if setting.lora_rank:
        count = sizes.adapter_parameters(setting.lora_rank, setting.lora_targets)
        lines.append(f"adapters of rank {setting.lora_rank} for {', '.join(setting.lora_targets)}: {count / 1e6:.1f} M")
    lines += [f"  {kind:<12}{size / 1e9:>10.2f} GB" for kind, size in need.kinds.items()]
    lines.append(f"  {'total':<12}{need.total / 1e9:>10.2f} GB a rank, of {room / 1e9:.1f} that it may use")
    fits = need.total <= room
    lines.append("  fits" if fits else f"  does not fit: {cure(sizes, setting, room, longest)}")
    told = ", ".join(f"{kind} {size / 1e9:.1f}" for kind, size in host.kinds.items() if size)
    lines.append(f"host: {host.total / 1e9:.1f} GB a node of {setting.ranks_of_node} ranks ({told})")
    if 0 < host_bytes < host.total:
        fits = False
        lines[-1] += f"; does not fit into {host_bytes / 1e9:.0f} GB: {host_cure(sizes, setting, host_bytes)}"
    return "\n".join([*lines, *_times(sizes, setting, speed or Speed())]), fits


def _times(sizes: ModelSizes, setting: Setting, speed: Speed) -> list[str]:
    step, publication = step_time(sizes, setting, speed), publication_time(sizes, setting, speed)
    slower = f"; {FLOAT32_TAKES}" if setting.dtype_bytes == FP32 else ""
    gathered = f" after gathering {publication.gathered / 1e9:.1f} GB at {speed.gather:g} GB/s"
    return [
        f"a step: about {step.seconds:.1f} s, assuming {setting.episodes} episodes of {setting.episode_tokens} tokens "
        f"({step.flops:.2g} operations) at {speed.mfu:.0%} of {speed.tflops:g} TFLOP/s a GPU in bfloat16, none of them "
        f"waiting{slower}",
        f"a publication: about {publication.seconds:.1f} s, assuming {publication.sent / 1e9:.3g} GB sent at "
        f"{speed.wire:g} GB/s{gathered if publication.gathered else ''}",
    ]


def meshes(name: str, sizes: ModelSizes, setting: Setting, longest: int, gpu_bytes: float, speed: Speed) -> str:
    """The best few for a longest episode, and what plain FSDP would be."""
    room = gpu_bytes * (1 - RESERVED_FRACTION)
    found = choices(sizes, setting, longest, room, speed)
    lines = [f"{name}: episodes of up to {longest} tokens on {setting.gpus} GPUs of {gpu_bytes / 1e9:.0f} GB"]
    lines += [f"  {choice}" for choice in found[:BEST]] or ["  no mesh fits: use more GPUs, or offload"]
    if plain := next((c for c in found[BEST:] if c.setting.context == c.setting.expert == 1), None):
        lines.append(f"  with FSDP alone: {plain}")
    elif not any(c.setting.context == c.setting.expert == 1 for c in found):
        lines.append("  FSDP alone does not fit")
    return "\n".join(lines)


BEST = 3
ASSUMED = {
    "tflops": "assumed of a GPU at most; an H100's in bfloat16",
    "mfu": "assumed share of it that a step makes use of",
    "gather": "GB a second, assumed of gathering shards",
    "node": "GB a second, assumed that a GPU receives within its node",
    "net": "GB a second, assumed that a GPU receives from other nodes",
    "wire": "GB a second, assumed from rank 0 to the engines",
    "hbm": "GB a second, assumed that a GPU reads of its memory at most, for --split's engines; an H100's",
    "decode": "assumed share of it that these engines make use of, their pauses between tokens included",
    "host": "GB a second, assumed between a GPU and its host",
}


def options_parser() -> argparse.ArgumentParser:
    """Each option of a setting is a field of `Setting`, and stays away unless it is given."""
    parser = recipe_parser(__doc__, required=False)
    parser.add_argument("--model", default="", help=f"a folder, or {', '.join(PUBLISHED)}; left out: all of these")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--gpu-memory", type=float, default=141, help="of one GPU, in GB")
    parser.add_argument("--longest", type=int, default=0, help="tokens of the longest episode: compare meshes for it")
    parser.add_argument("--host-memory", type=float, default=0, help="of one node, in GB; 0: not judged")
    parser.add_argument("--split", action="store_true", help="divide --gpus between learner and engines, by simulation")
    for field in fields(Speed):
        parser.add_argument(f"--{field.name}", type=float, default=field.default, help=ASSUMED[field.name])
    of_setting = parser.add_argument_group("setting", argument_default=argparse.SUPPRESS)
    of_setting.add_argument("--shard-size", type=int, help="GPUs that share one copy; 0 = all")
    of_setting.add_argument("--dtype", choices=DTYPE_BYTES, help="of forward and backward; bfloat16")
    of_setting.add_argument("--context", type=int, help="GPUs that share each microbatch; 1")
    of_setting.add_argument("--expert", type=int, help="GPUs over which a mixture's experts are dealt; 1")
    of_setting.add_argument("--microbatch-tokens", type=int, help="for each of its GPUs")
    of_setting.add_argument("--gpus-per-node", type=int, help="that share a host; 8")
    of_setting.add_argument("--episodes", type=int, help="of a step; a recipe's, or 128")
    of_setting.add_argument("--episode-tokens", type=int, help="of a mean episode; half of model.max_context, or 8192")
    of_setting.add_argument("--activation-checkpointing", action="store_true")
    of_setting.add_argument("--offload", action="store_true")
    of_setting.add_argument("--optimizer", choices=("adamw", "muon"))
    of_setting.add_argument("--freeze", nargs="*", choices=("vision", "projector"))
    of_setting.add_argument("--lora-rank", type=int, help="adapters are trained; 0 = all weights are")
    of_setting.add_argument("--lora-targets", nargs="+", choices=get_args(Target), help="attention dense")
    of_setting.add_argument("--lora-publish", choices=("merged", "adapter"), help="what engines are sent; merged")
    return parser


def _check_options(setting: Setting, assumed: list[float]) -> None:
    """ValueError, with the next values that fit."""
    counts = [setting.gpus, setting.shards, setting.context, setting.expert]
    if min(*counts, setting.gpus_per_node, setting.episodes, setting.episode_tokens, *assumed) <= 0:
        raise ValueError("numbers of GPUs, of episodes and of tokens, and what is assumed, must be above 0")
    if setting.lora_rank < 0:
        raise ValueError(f"--lora-rank {setting.lora_rank} is no rank: 0, or more")
    every = f"--gpus {setting.gpus}"
    for option, value, of, which in (
        ("--shard-size", setting.shards, setting.gpus, every),
        ("--context", setting.context, setting.gpus, every),
        ("--expert", setting.expert, setting.shards, f"the {setting.shards} GPUs of a copy"),
    ):
        if of % value:
            raise ValueError(f"{option} {value} does not divide {which}; set it to {next_divisors(value, of)}")


def _check_model(name: str, setting: Setting, longest: int) -> None:
    """ValueError: experts that cannot be dealt so, episodes longer than the model's context."""
    sizes = find(name)
    _check_experts(name, sizes, setting.expert, setting.shards)
    _check_context(name, "--longest", longest)


def _check_context(name: str, option: str, tokens: int) -> None:
    if tokens > (most := find(name).max_context):
        raise ValueError(f"{option} {tokens} is longer than the context of {name}; set it to {most} at most")


def main(argv: list[str] | None = None) -> int:
    parser = options_parser()
    options, overrides = parser.parse_known_args(argv)
    if overrides and not options.config:
        parser.error(f"unknown option {overrides[0]}; the fields of a recipe need --config R.toml")
    given = {name: value for name, value in vars(options).items() if name in Setting.__dataclass_fields__}
    given |= {"dtype_bytes": DTYPE_BYTES[options.dtype]} if "dtype" in options else {}
    gpu_bytes, names = options.gpu_memory * 1e9, [options.model] if options.model else list(PUBLISHED)
    setting, longest = Setting(logits_bytes=0.1 * gpu_bytes), 0
    if options.config:
        recipe = load(options.config, overrides)
        setting, names = _as_written(recipe, options.gpus, gpu_bytes), [options.model or recipe.model.path]
        longest = recipe.model.max_context
    setting = replace(setting, **given)
    try:
        _check_options(setting, [getattr(options, name) for name in ASSUMED])
        setting = replace(setting, microbatch_tokens=_microbatch(setting, longest))
        if len(names) == 1:
            _check_model(names[0], setting, options.longest)
        if "episode_tokens" in given:
            for name in names:
                _check_context(name, "--episode-tokens", setting.episode_tokens)
        else:
            shortest = min(find(name).max_context for name in names)
            setting = replace(setting, episode_tokens=min(setting.episode_tokens, shortest))
        speed = Speed(**{field.name: getattr(options, field.name) for field in fields(Speed)})
        if options.split:
            room = gpu_bytes * (1 - RESERVED_FRACTION)
            print("\n\n".join(split.report(name, find(name), setting, room, speed, gpu_bytes) for name in names))
            return 0
        if options.longest:
            print("\n\n".join(meshes(n, find(n), setting, options.longest, gpu_bytes, speed) for n in names))
            return 0
        judged = (gpu_bytes, options.host_memory * 1e9, speed, longest)
        reports = [report(name, find(name), setting, *judged) for name in names]
    except ValueError as error:
        return fail(error)
    print("\n\n".join(text for text, _ in reports))
    return 0 if all(fits for _, fits in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
