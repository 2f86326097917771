"""Will it fit? Bytes per rank by kind, from a model's sizes alone: no weights, no GPU.

python -m learner.plan --model Qwen3-VL-8B --gpus 8 --gpu-memory 141
python -m learner.plan --config launch/recipes/geo3k.toml --gpus 8 [--section.key VALUE ...]
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from learner.model.sizes import PUBLISHED, ModelSizes, find, sizes_of
from shared.config import Recipe, fail, load, recipe_parser

FP32 = 4
DTYPE_BYTES = {"float32": FP32, "bfloat16": 2}
ADAMW_STATES, MUON_STATES = 2, 1  # float32 each
RESERVED_FRACTION = 0.06  # of a GPU: context, communication buffers, what the allocator cannot use


@dataclass(frozen=True, slots=True)
class Setting:
    """What the sizes of a run depend on, besides the model; the names are those of a recipe."""

    gpus: int = 1
    shard_size: int = 0  # ranks that share one copy; 0 = all
    dtype_bytes: int = 2  # of forward and backward
    microbatch_tokens: int = 16384
    visual_share: float = 0.5  # of the tokens, those of images
    sampled_share: float = 0.5  # of the tokens, those that are trained on
    logits_bytes: float = 14e9  # what the fused log-probability may hold of logits
    activation_checkpointing: bool = False
    offload: bool = False
    reference: bool = False
    optimizer: str = "adamw"
    freeze: tuple[str, ...] = ()

    @property
    def shards(self) -> int:
        return self.shard_size or self.gpus

    @property
    def sharded(self) -> bool:
        """Whether FSDP holds float32 shards and gathers copies of `dtype_bytes`."""
        return self.gpus > 1 or self.dtype_bytes != FP32 or self.offload


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank at the peak, by kind."""

    weights: float
    gradients: float
    optimizer: float
    reference: float
    gathered: float  # whole blocks and the output head while they are computed
    activations: float  # what the forward of one microbatch keeps for its backward
    logits: float

    @property
    def total(self) -> float:
        return sum(asdict(self).values())


def memory(sizes: ModelSizes, setting: Setting) -> Memory:
    """Of one rank on its device."""
    trained = sizes.parameters
    trained -= sizes.vision_parameters if "vision" in setting.freeze else 0
    trained -= sizes.projector_parameters if "projector" in setting.freeze else 0
    here = 0.0 if setting.offload else FP32 / setting.shards
    weights, gradients = here * sizes.parameters, here * trained
    rows = setting.microbatch_tokens * setting.sampled_share
    spared = sizes.matrix_parameters * (ADAMW_STATES - MUON_STATES) if setting.optimizer == "muon" else 0
    return Memory(
        weights=weights,
        gradients=gradients,
        optimizer=here * (ADAMW_STATES * trained - spared),
        reference=weights if setting.reference else 0.0,
        gathered=_gathered(sizes, setting) if setting.sharded else 0.0,
        activations=activations(sizes, setting),
        logits=min(setting.logits_bytes, FP32 * rows * sizes.vocab_size),
    )


def _gathered(sizes: ModelSizes, setting: Setting) -> float:
    """Copies of two neighbouring blocks and of all that is in no block; the gradients of one block and of the rest."""
    layer = sizes.layer_parameters(sparse=sizes.num_dense_layers < sizes.num_layers)
    rest = sizes.head_parameters * (1 if sizes.tied else 2) + sizes.projector_parameters
    return setting.dtype_bytes * (3 * layer + 2 * rest)


def activations(sizes: ModelSizes, setting: Setting) -> float:
    """Bytes that one microbatch's forward keeps for its backward."""
    kept: float
    text, patches = setting.microbatch_tokens, setting.microbatch_tokens * setting.visual_share * sizes.merge
    per_token = _layer_bytes(sizes, setting.dtype_bytes)
    per_patch = setting.dtype_bytes * (11 * sizes.vision_hidden + 2 * sizes.vision_intermediate)  # of one vision block
    if setting.activation_checkpointing:  # the inputs of all, and one at a time in full
        kept = sizes.num_layers * sizes.hidden_size * setting.dtype_bytes * text
        kept += sizes.vision_depth * sizes.vision_hidden * setting.dtype_bytes * patches
        kept += max(per_token * text, per_patch * patches)
    else:
        trimmed = sizes.num_layers > sizes.num_deepstack  # see learner/model/last_layer.py
        last = _layer_bytes(sizes, setting.dtype_bytes, asked=setting.sampled_share if trimmed else 1.0)
        kept = ((sizes.num_layers - 1) * per_token + last) * text + sizes.vision_depth * per_patch * patches
    ends = _norm_bytes(sizes.hidden_size, setting.dtype_bytes) * text  # the last norm
    ends += sizes.hidden_size * setting.dtype_bytes * (setting.sampled_share + 1) * text  # its rows; the embeddings
    merged = setting.dtype_bytes * 4 * (1 + sizes.num_deepstack) * sizes.vision_hidden
    return kept + ends + (merged + FP32 * sizes.patch_values / 2) * patches


def _norm_bytes(size: int, dtype_bytes: int) -> float:
    """Of one RMSNorm a token: its input widened to float32, the normalised input, and its result."""
    return size * (FP32 + 2 * dtype_bytes)


def _layer_bytes(sizes: ModelSizes, dtype_bytes: int, asked: float = 1.0) -> float:
    """Of one decoder layer a token (the mean over its layers, where some have experts); `asked`: share of the tokens
    whose output it computes. Queries are counted for all, as GPUs compute them."""
    q, kv = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
    attention = _norm_bytes(sizes.hidden_size, dtype_bytes) + _norm_bytes(q + kv, dtype_bytes)
    attention += dtype_bytes * (kv + 2 * q) + FP32 * sizes.num_heads
    dense = dtype_bytes * 4 * sizes.intermediate_size
    routed = sizes.experts_per_token * dtype_bytes * (2 * sizes.hidden_size + 4 * sizes.expert_size)
    sparse_share = 1 - sizes.num_dense_layers / sizes.num_layers
    mlp = (1 - sparse_share) * dense + sparse_share * (routed + 3 * FP32 * sizes.num_experts)
    return attention + asked * (_norm_bytes(sizes.hidden_size, dtype_bytes) + mlp)


def check(sizes: ModelSizes, setting: Setting, gpu_bytes: float, name: str) -> Memory:
    """ValueError, with the numbers and what would help, if it does not fit."""
    need = memory(sizes, setting)
    room = gpu_bytes * (1 - RESERVED_FRACTION)
    if need.total > room:
        parts = ", ".join(f"{kind} {size / 1e9:.1f}" for kind, size in asdict(need).items() if size >= 5e7)
        raise ValueError(
            f"{name} does not fit: a rank needs {need.total / 1e9:.1f} GB ({parts}), a GPU of {gpu_bytes / 1e9:.0f} GB "
            f"has room for {room / 1e9:.1f}; {_cure(sizes, setting, room)}"
        )
    return need


def check_recipe(recipe: Recipe, num_ranks: int, gpu_bytes: float | None) -> None:
    """Before anything is loaded. ValueError: a context longer than the model's or, with `gpu_bytes`, what cannot fit.

    A model whose sizes are not known here passes.
    """
    path = recipe.model.path
    file = Path(path) / "config.json"
    sizes = sizes_of(json.loads(file.read_text())) if file.exists() else None
    if sizes is None:
        return
    if recipe.model.max_context > sizes.max_context:
        raise ValueError(
            f"model.max_context = {recipe.model.max_context} is longer than the context of {path}, which is "
            f"{sizes.max_context} tokens; lower it"
        )
    if gpu_bytes is not None:
        check(sizes, setting_of(recipe, num_ranks, gpu_bytes), gpu_bytes, path)


def setting_of(recipe: Recipe, num_ranks: int, gpu_bytes: float) -> Setting:
    """What a recipe's run on that many GPUs depends on."""
    objective, optimizer, parallel = recipe.learner.objective, recipe.learner.optimizer, recipe.learner.parallel
    return Setting(
        gpus=num_ranks,
        shard_size=parallel.shard_size,
        dtype_bytes=DTYPE_BYTES[recipe.model.dtype],
        microbatch_tokens=max(parallel.microbatch_tokens, recipe.model.max_context),
        logits_bytes=0.1 * gpu_bytes,
        activation_checkpointing=parallel.activation_checkpointing,
        offload=parallel.offload,
        reference=objective.kl_coef != 0,
        optimizer=optimizer.name,
        freeze=optimizer.freeze,
    )


def _cure(sizes: ModelSizes, setting: Setting, room: float) -> str:
    """The first change that would make it fit."""
    checkpointing = "set learner.parallel.activation_checkpointing = true"
    if not setting.activation_checkpointing:
        if memory(sizes, replace(setting, activation_checkpointing=True)).total <= room:
            return checkpointing
        setting = replace(setting, activation_checkpointing=True)
    tokens = setting.microbatch_tokens
    while tokens > 2048:
        tokens //= 2
        if memory(sizes, replace(setting, microbatch_tokens=tokens)).total <= room:
            return f"{checkpointing} and learner.parallel.microbatch_tokens = {tokens}"
    gpus = setting.gpus
    while gpus < 1 << 14:
        gpus *= 2
        if memory(sizes, replace(setting, gpus=gpus, shard_size=0)).total <= room:
            return f"{checkpointing} and use {gpus} GPUs"
    return "set learner.parallel.offload = true, or use larger GPUs"


def report(name: str, sizes: ModelSizes, setting: Setting, gpu_bytes: float) -> tuple[str, bool]:
    """A table for people, and whether it fits."""
    need, room = memory(sizes, setting), gpu_bytes * (1 - RESERVED_FRACTION)
    parts = {"text": sizes.text_parameters, "vision": sizes.vision_parameters, "projector": sizes.projector_parameters}
    lines = [f"{name}: {sizes.parameters / 1e9:.3f} B parameters"]
    lines[0] += f" ({', '.join(f'{part} {count / 1e9:.3f}' for part, count in parts.items())})"
    lines.append(
        f"{setting.gpus} GPUs of {gpu_bytes / 1e9:.0f} GB, {setting.shards} a copy; "
        f"{setting.microbatch_tokens} tokens a microbatch, {setting.visual_share:.0%} of them images"
    )
    lines += [f"  {kind:<12}{size / 1e9:>10.2f} GB" for kind, size in asdict(need).items()]
    lines.append(f"  {'total':<12}{need.total / 1e9:>10.2f} GB a rank, of {room / 1e9:.1f} that it may use")
    fits = need.total <= room
    lines.append("  fits" if fits else f"  does not fit: {_cure(sizes, setting, room)}")
    return "\n".join(lines), fits


def options_parser() -> argparse.ArgumentParser:
    """Each option of a setting is a field of `Setting`, and stays away unless it is given."""
    parser = recipe_parser(__doc__, required=False)
    parser.add_argument("--model", default="", help=f"a folder, or {', '.join(PUBLISHED)}; left out: all of these")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--gpu-memory", type=float, default=141, help="of one GPU, in GB")
    of_setting = parser.add_argument_group("setting", argument_default=argparse.SUPPRESS)
    of_setting.add_argument("--shard-size", type=int, help="GPUs that share one copy; 0 = all")
    of_setting.add_argument("--dtype", choices=DTYPE_BYTES, help="of forward and backward; bfloat16")
    of_setting.add_argument("--microbatch-tokens", type=int)
    of_setting.add_argument("--activation-checkpointing", action="store_true")
    of_setting.add_argument("--offload", action="store_true")
    of_setting.add_argument("--optimizer", choices=("adamw", "muon"))
    of_setting.add_argument("--freeze", nargs="*", choices=("vision", "projector"))
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = options_parser()
    options, overrides = parser.parse_known_args(argv)
    if overrides and not options.config:
        parser.error(f"unknown option {overrides[0]}; the fields of a recipe need --config R.toml")
    given = {name: value for name, value in vars(options).items() if name in Setting.__dataclass_fields__}
    if "dtype" in options:
        given["dtype_bytes"] = DTYPE_BYTES[options.dtype]
    gpu_bytes, names = options.gpu_memory * 1e9, [options.model] if options.model else list(PUBLISHED)
    setting = Setting(logits_bytes=0.1 * gpu_bytes)
    if options.config:
        recipe = load(options.config, overrides)
        setting, names = setting_of(recipe, options.gpus, gpu_bytes), [options.model or recipe.model.path]
    setting = replace(setting, **given)
    try:
        if setting.gpus < 1 or setting.gpus % setting.shards:
            raise ValueError(f"--shard-size {setting.shards} does not divide --gpus {setting.gpus}")
        reports = [report(name, find(name), setting, gpu_bytes) for name in names]
    except ValueError as error:
        return fail(error)
    print("\n\n".join(text for text, _ in reports))
    return 0 if all(fits for _, fits in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
