"""What the learner changes inside a model of transformers, and the private parts of torch and transformers it needs.

This module alone applies such tricks, and TRICKS is the table of them. Each is checked before it is used: a library
that no longer has what a trick needs is refused in one line.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kernels.cpu.gelu import use_fast_gelu
from kernels.cpu.linear import use_fast_linear, use_plain_linear
from learner.model import forwards
from learner.model.attention import packed_attention
from learner.model.patch_embed import StillPatchEmbed
from learner.packing.tower import ALIGN_CORNERS, MODE, takes_precomputed
from shared.vision import VisionSpec

ATTENTION = "pronk_packed"
LINEAR_POINTWISE = ("X", "W", "B", "attr", "scalars", "algorithm")


@dataclass(frozen=True, slots=True)
class Trick:
    library: str
    needs: str
    why: str
    test: str  # that fails when the trick no longer computes the same
    until: str  # when it can go

    def require(self, fits: bool) -> None:
        """ValueError, in one line, if the installed library does not fit."""
        if not fits:
            raise ValueError(
                f"{self.library} {version(self.library)} does not fit: the learner needs {self.needs} ({self.why}); "
                f"install a version of {self.library} that pyproject.toml allows"
            )


TRICKS = {
    "onednn": Trick(
        "torch",
        "the private operator mkldnn._linear_pointwise(X, W, B, attr, scalars, algorithm)",
        "float32 products on AMD and of the fused logprob take half the time",
        "test_linear.py::test_values_and_gradients_are_those_of_torch_linear",
        "torch's own linear chooses the faster library",
    ),
    "addmm": Trick(
        "torch",
        "the private overloads aten.mm.dtype_out and aten.addmm.dtype_out",
        "half-precision products are written and summed in float32 without a copy",
        "test_kernels.py::test_results_and_gradients_agree_with_float64",
        "torch.addmm takes out_dtype with out",
    ),
    "own_forward": Trick(
        "torch",
        "that a module's own `forward` goes before its class's",
        "linears, GELUs and the last layer compute otherwise, under the same parameter names",
        "test_linear.py::test_every_plain_linear_of_a_model_computes_so_until_it_is_undone_and_a_copy_has_its_own_parameters",
        "transformers lets a model's layers be replaced",
    ),
    "rms_norm": Trick(
        "transformers",
        "classes called ...RMSNorm with a weight and a variance_epsilon that compute torch's rms_norm",
        "a norm is one pass over memory in each direction",
        "test_cpu_norm.py",
        "transformers computes them by torch.nn.functional.rms_norm, and torch in one pass each way",
    ),
    "swiglu": Trick(
        "transformers",
        "MLPs of gate_proj, up_proj, down_proj and act_fn that multiply by their gate",
        "that is one pass over memory in each direction",
        "test_cpu_swiglu.py",
        "torch computes it in one pass",
    ),
    "vision_attention": Trick(
        "transformers",
        "vision towers' attentions with the parts that learner/model/forwards.py copies",
        "all images are one call, and heads are turned in one pass over memory",
        "test_model.py::test_packed_equals_unpacked_with_several_images_per_document_in_values_and_gradients",
        "an attention can ask for all images at once",
    ),
    "patch_embed": Trick(
        "transformers",
        "visual.patch_embed.proj, a convolution whose window is its stride",
        "patches come as uint8, each still image once",
        "test_model.py::test_packed_logprobs_equal_a_plain_forward_with_vision_ids_banned",
        "transformers takes uint8 patches of still images",
    ),
    "decoder": Trick(
        "transformers",
        "language models of embed_tokens, rotary_emb, layers that take position_embeddings=, and norm",
        "layers that two policies have in common are computed once, and features are added without waiting for a GPU",
        "test_model.py::test_packed_logprobs_equal_a_plain_forward_with_vision_ids_banned",
        "transformers computes chosen layers, and adds the features at places that it is told",
    ),
    "tower": Trick(
        "transformers",
        "towers that take what transformers.vision_utils makes of grids, interpolated bilinearly from corner to corner",
        "they would compute it on the GPU, and the host wait for it",
        "test_host_syncs.py",
        "transformers computes it on the host",
    ),
    "attention": Trick(
        "transformers",
        "a Qwen3-VL attention with the parts that learner/model/forwards.py copies",
        "queries and keys are normed and turned in one pass, and the last layer asks at sampled places alone",
        "test_model.py::test_packed_logprobs_equal_a_plain_forward_with_vision_ids_banned",
        "transformers norms and turns heads in one pass, and takes chosen queries",
    ),
    "layer": Trick(
        "transformers",
        "decoder layers with the parts that learner/model/forwards.py copies",
        "what a norm reads is added up in the same pass, and the last layer is computed at the sampled places alone",
        "test_model.py::test_leaving_out_what_nothing_reads_of_the_last_layer_changes_no_value_and_no_gradient",
        "transformers computes a layer for chosen rows",
    ),
    "routers": Trick(
        "transformers",
        "routers with num_experts and top_k that return the chosen experts last",
        "moe/* metrics count what each expert got",
        "test_learner_ranks.py",
        "transformers returns the routers' choices without their logits",
    ),
    "empty": Trick(
        "transformers",
        "a method _init_weights that computes the buffers that no checkpoint holds, and torch modules' _apply",
        "large models are built without memory, sharded, then loaded shard by shard",
        "test_loading.py::test_parameters_and_buffers_are_bit_for_bit_those_of_transformers",
        "transformers builds a model on torch's device meta with its buffers in memory",
    ),
    "varlen": Trick(
        "torch",
        "torch.nn.attention.varlen.varlen_attn with scale and window_size",
        "documents of any length are one call on a GPU",
        "test_attention_backend.py",
        "the API is no longer a prototype",
    ),
}


def adapt(vlm: PreTrainedModel, spec: VisionSpec) -> bool:
    """Makes a Qwen-VL model of transformers take uint8 patches and `packing=`, its parameters keeping their names.

    Returns whether the last decoder layer now takes `rows=` too. It cannot where the deepstack's features reach as far
    as the last layer: they are added to all places. ValueError as the tricks'.
    """
    check_torch()
    visual, layers = vlm.model.visual, vlm.model.language_model.layers
    proj: Any = getattr(getattr(visual, "patch_embed", None), "proj", None)
    TRICKS["patch_embed"].require(isinstance(proj, nn.Conv3d) and proj.stride == proj.kernel_size)
    visual.patch_embed = StillPatchEmbed(proj, spec)
    _register(packed_attention)
    vlm.set_attn_implementation({"text_config": ATTENTION, "vision_config": ATTENTION})
    for index, block in enumerate(visual.blocks):
        _replace_look(block.attn)
        block.attn.looks_through_windows = index not in getattr(visual, "fullatt_block_indexes", (index,))
    fixed = getattr(visual, "interpolation_mode", MODE), getattr(visual, "interpolation_align_corners", ALIGN_CORNERS)
    TRICKS["tower"].require(fixed == (MODE, ALIGN_CORNERS) and takes_precomputed())
    TRICKS["decoder"].require(_is_known_decoder(vlm.model.language_model))
    for layer in layers:
        _replace_attention(getattr(layer, "self_attn", None))
        _replace_layer(layer)
    use_fast_linear(vlm)
    use_fast_gelu(vlm)
    use_fast_parts(vlm)
    return len(layers) > len(getattr(vlm.config.vision_config, "deepstack_visual_indexes", ()))


def use_fast_parts(model: nn.Module) -> None:
    """Makes every norm and SwiGLU MLP of the model compute in one pass where it can: kernels/gpu, kernels/cpu."""
    for module in model.modules():
        kind: Any = type(module)
        if kind.__name__.endswith("RMSNorm"):
            TRICKS["rms_norm"].require(_is_known_norm(kind))
            module.forward = MethodType(forwards.normed, module)
        elif kind is nn.LayerNorm:
            module.forward = MethodType(forwards.centred, module)
        elif type(getattr(module, "act_fn", None)).__name__.startswith("SiLU") and hasattr(module, "gate_proj"):
            TRICKS["swiglu"].require(_is_known_mlp(kind))
            module.forward = MethodType(forwards.gated, module)


def _is_known_norm(kind: Any) -> bool:
    with torch.device("cpu"):
        norm, x = kind(8, eps=0.25), torch.arange(16.0).reshape(2, 8)
    if {name for name, _ in norm.named_parameters()} != {"weight"} or getattr(norm, "variance_epsilon", 0) != 0.25:
        return False
    return torch.allclose(norm(x), nn.functional.rms_norm(x, (8,), None, 0.25))


def _is_known_mlp(kind: Any) -> bool:
    """Whether its forward is that of its parts, here other ones."""
    parts = SimpleNamespace(gate_proj=torch.sin, up_proj=torch.cos, down_proj=torch.neg, act_fn=torch.exp)
    with torch.device("cpu"):
        x = torch.arange(8.0)
        try:
            return torch.equal(kind.forward(parts, x), -(x.sin().exp() * x.cos()))
        except (AttributeError, TypeError):  # it has other parts or arguments
            return False


@torch.no_grad()
def materialize(module: nn.Module, vlm: PreTrainedModel, device: torch.device, *, offload: bool) -> None:
    """Gives what has none memory on `device` (with `offload` the parameters on the CPU): buffers with their values,
    parameters without. Tied parameters stay so. FSDP's own `_apply` notices shards that were exchanged."""
    made: dict[int, tuple[Tensor, Tensor]] = {}  # by the id of what it replaces, which is held so that it stays taken

    def real(tensor: Tensor) -> Tensor:
        place = torch.device("cpu") if offload and isinstance(tensor, nn.Parameter) else device
        if not tensor.is_meta:
            return tensor.to(place)
        if id(tensor) not in made:
            new = torch.empty_like(tensor, device=place)
            made[id(tensor)] = (tensor, new if isinstance(tensor, nn.Parameter) else new.fill_(torch.nan))
        return made[id(tensor)][1]

    module._apply(real)
    vlm.tie_weights()
    for part in vlm.modules():
        if any(True for _ in part.buffers(recurse=False)) and not any(True for _ in part.parameters()):
            vlm._init_weights(part)
    TRICKS["empty"].require(all(bool(buffer.isfinite().all()) for buffer in vlm.buffers()))


def check_torch() -> None:
    """ValueError if the installed torch lacks what the kernels and this module take from it."""
    if torch.backends.mkldnn.is_available():
        operator = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
        TRICKS["onednn"].require(operator is not None and _arguments(operator.default) == LINEAR_POINTWISE)
    products = (torch.ops.aten.mm, torch.ops.aten.addmm)
    TRICKS["addmm"].require(all(hasattr(product, "dtype_out") for product in products))
    probe = nn.Identity()
    probe.forward = lambda input: -input  # type: ignore[method-assign]
    TRICKS["own_forward"].require(probe(1) == -1)


def check_varlen() -> None:
    """ValueError if the installed torch has no attention of variable length with the options that we use."""
    try:
        from torch.nn.attention.varlen import varlen_attn

        arguments = {*inspect.signature(varlen_attn).parameters}
    except ImportError:
        arguments = set()
    TRICKS["varlen"].require({"scale", "window_size"} <= arguments)


def adapt_to_compile(vlm: PreTrainedModel) -> None:
    """For compiled blocks. Attention stays outside of the graphs: where documents begin and end differs in each
    microbatch, and would compile anew."""
    _register(torch.compiler.disable(packed_attention))
    use_plain_linear(vlm)


def _register(attention: Callable[..., Any]) -> None:
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attention)


def _is_known_decoder(text: Any) -> bool:
    parts = ("embed_tokens", "rotary_emb", "layers", "norm")
    if not all(hasattr(text, name) for name in parts):
        return False
    return all("position_embeddings" in inspect.signature(type(layer).forward).parameters for layer in text.layers)


def _replace_attention(attention: Any) -> None:
    """Of Qwen3; Qwen2.5 turns its heads in another way, and keeps its attention."""
    if hasattr(attention, "q_norm"):
        TRICKS["attention"].require(_has(attention, forwards.ATTENTION_PARTS, forwards.ATTENTION_ARGUMENTS))
        attention.forward = MethodType(forwards.attend, attention)


def _replace_look(attention: Any) -> None:
    TRICKS["vision_attention"].require(_has(attention, forwards.LOOK_PARTS, forwards.LOOK_ARGUMENTS))
    attention.forward = MethodType(forwards.look, attention)


def _has(module: Any, parts: Sequence[str], arguments: Sequence[str]) -> bool:
    found = inspect.signature(module.forward).parameters.keys()
    return all(hasattr(module, name) for name in parts) and {*arguments} <= found


def _replace_layer(layer: Any) -> None:
    TRICKS["layer"].require(all(hasattr(layer, name) for name in forwards.LAYER_PARTS))
    layer.forward = MethodType(forwards.decode, layer)


def _arguments(operator: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in operator._schema.arguments)
