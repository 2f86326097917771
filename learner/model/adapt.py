"""The changes that the learner makes to a model of transformers, and the private parts of torch and transformers it
needs.

The table TRICKS lists them. Each is checked before it is used: if an installed library lacks what a trick needs, a
one-line error says so. Code that gives a module another forward or class, or replaces it by a stand-in, uses the
functions of this module. The exceptions are kernels/cpu/linear.py and gelu.py, which import nothing of the learner and
set a forward themselves.
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
from learner.batch.vision_inputs import ALIGN_CORNERS, MODE, takes_precomputed
from learner.model import forwards
from learner.model.attention import packed_attention
from learner.model.patch_embed import StillPatchEmbed
from shared.families.registry import family_named
from shared.vision import VisionSpec

ATTENTION = "pronk_packed"
LINEAR_POINTWISE = ("X", "W", "B", "attr", "scalars", "algorithm")


@dataclass(frozen=True, slots=True)
class Trick:
    library: str
    needs: str
    why: str
    test: str  # the test that fails when the trick no longer computes the same
    until: str  # the change of the library that makes the trick unnecessary

    def require(self, fits: bool) -> None:
        """Raise ValueError, in one line, if the installed library does not fit."""
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
        "kernels/cpu/test_linear.py::test_values_and_gradients_are_those_of_torch_linear",
        "torch's own linear chooses the faster library",
    ),
    "addmm": Trick(
        "torch",
        "the private overloads aten.mm.dtype_out and aten.addmm.dtype_out",
        "half-precision products are written and summed in float32 without a copy",
        "kernels/test_linear_logprob.py::test_results_and_gradients_agree_with_float64",
        "torch.addmm takes out_dtype with out",
    ),
    "own_forward": Trick(
        "torch",
        "that a module's own `forward` goes before its class's",
        "linears, GELUs and the last layer compute otherwise, under the same parameter names",
        "kernels/cpu/test_linear.py::test_every_plain_linear_of_a_model_computes_so_until_it_is_undone_and_a_copy_has_its_own_parameters",
        "transformers lets a model's layers be replaced",
    ),
    "own_class": Trick(
        "torch",
        "that an nn.Linear can be made an object of a class derived from it",
        "a linear gets an adapter beside its weight, which keeps its name",
        "learner/model/test_lora.py::test_logprobs_are_bit_for_bit_those_of_the_merged_model_and_gradients_those_of_its_own",
        "transformers lets a model's linears be replaced under their names",
    ),
    "stand_in": Trick(
        "transformers",
        "experts whose forward reads its weights as attributes of the module",
        "transformers computes experts by weights that are dealt over ranks, or have adapters merged into them",
        "learner/model/test_lora.py::test_logprobs_are_bit_for_bit_those_of_the_merged_model_and_gradients_those_of_its_own",
        "transformers computes experts by a function of their weights",
    ),
    "rms_norm": Trick(
        "transformers",
        "classes called ...RMSNorm with a weight that compute torch's rms_norm, times their family's offset and weight",
        "a norm is one pass over memory in each direction",
        "kernels/cpu/test_cpu_norm.py",
        "transformers computes them by torch.nn.functional.rms_norm, and torch in one pass each way",
    ),
    "swiglu": Trick(
        "transformers",
        "MLPs of gate_proj, up_proj, down_proj and act_fn that multiply by their gate",
        "that is one pass over memory in each direction",
        "kernels/cpu/test_cpu_swiglu.py",
        "torch computes it in one pass",
    ),
    "vision_attention": Trick(
        "transformers",
        "vision towers' attentions with the parts that learner/model/forwards.py copies",
        "all images are one call, and heads are turned in one pass over memory",
        "learner/model/test_policy.py::test_packed_equals_unpacked_with_several_images_per_document_in_values_and_gradients",
        "an attention can ask for all images at once",
    ),
    "patch_embed": Trick(
        "transformers",
        "visual.patch_embed.proj, a convolution whose window is its stride",
        "patches come as uint8, each still image once",
        "learner/model/test_policy.py::test_packed_logprobs_equal_a_plain_forward_with_vision_ids_banned",
        "transformers takes uint8 patches of still images",
    ),
    "decoder": Trick(
        "transformers",
        "language models of embed_tokens, rotary_emb, layers that take position_embeddings=, and norm",
        "layers that two policies have in common are computed once, and features are added without waiting for a GPU",
        "learner/model/test_policy.py::test_packed_logprobs_equal_a_plain_forward_with_vision_ids_banned",
        "transformers computes chosen layers, and adds the features at places that it is told",
    ),
    "tower": Trick(
        "transformers",
        "towers that take what transformers.vision_utils makes of grids, interpolated bilinearly from corner to corner",
        "they would compute it on the GPU, and the host wait for it",
        "learner/training/test_host_syncs.py",
        "transformers computes it on the host",
    ),
    "attention": Trick(
        "transformers",
        "a Qwen3-VL attention with the parts that learner/model/forwards.py copies",
        "queries and keys are normed and turned in one pass, and the last layer asks at sampled places alone",
        "learner/model/test_policy.py::test_packed_logprobs_equal_a_plain_forward_with_vision_ids_banned",
        "transformers norms and turns heads in one pass, and takes chosen queries",
    ),
    "delta_net": Trick(
        "transformers",
        "gated delta nets with the parts that learner/model/forwards.py copies",
        "packed documents are kept apart: without flash-linear-attention, transformers' own state leaks between them",
        "learner/model/test_delta_nets.py::test_transformers_own_layers_leak_between_packed_documents",
        "transformers keeps packed documents apart on any device",
    ),
    "layer": Trick(
        "transformers",
        "decoder layers with the parts that learner/model/forwards.py copies",
        "what a norm reads is added up in the same pass, and the last layer is computed at the sampled places alone",
        "learner/model/test_policy.py::test_leaving_out_what_nothing_reads_of_the_last_layer_changes_no_value_and_no_gradient",
        "transformers computes a layer for chosen rows",
    ),
    "routers": Trick(
        "transformers",
        "routers with num_experts and top_k that return the chosen experts last",
        "moe/* metrics count what each expert got",
        "learner/training/test_learner_ranks.py",
        "transformers returns the routers' choices without their logits",
    ),
    "empty": Trick(
        "transformers",
        "a method _init_weights that computes the buffers that no checkpoint holds, and torch modules' _apply",
        "large models are built without memory, sharded, then loaded shard by shard",
        "learner/model/test_loading.py::test_parameters_and_buffers_are_bit_for_bit_those_of_transformers",
        "transformers builds a model on torch's device meta with its buffers in memory",
    ),
    "varlen": Trick(
        "torch",
        "torch.nn.attention.varlen.varlen_attn with scale and window_size",
        "documents of any length are one call on a GPU",
        "learner/model/test_attention_backend.py",
        "the API is no longer a prototype",
    ),
}


def adapt(vlm: PreTrainedModel, spec: VisionSpec) -> bool:
    """Make a model of transformers accept uint8 patches and `packing=`. Its parameters keep their names.

    Return whether the last decoder layer now accepts `rows=` too. It cannot if the deepstack's features reach the last
    layer, since they are added at all positions. Raise ValueError if a trick does not fit the installed libraries.
    """
    check_torch()
    family = family_named(vlm.config.model_type, "the model")
    visual, decoder = family.tower(vlm), family.decoder(vlm)
    layers = decoder.layers
    _register(packed_attention)
    if visual is None:
        vlm.set_attn_implementation(ATTENTION)
    else:
        _adapt_tower(visual, spec)
        vlm.set_attn_implementation({"text_config": ATTENTION, "vision_config": ATTENTION})
    TRICKS["decoder"].require(_is_known_decoder(decoder))
    for layer in layers:
        _replace_attention(getattr(layer, "self_attn", None))
        _replace_delta_net(getattr(layer, "linear_attn", None))
        _replace_layer(layer)
    use_fast_linear(vlm)
    use_fast_gelu(vlm)
    use_fast_parts(vlm, family.norm_offset)
    return len(layers) > len(getattr(visual, "deepstack_visual_indexes", ()))


def _adapt_tower(visual: Any, spec: VisionSpec) -> None:
    proj: Any = getattr(getattr(visual, "patch_embed", None), "proj", None)
    TRICKS["patch_embed"].require(isinstance(proj, nn.Conv3d) and proj.stride == proj.kernel_size)
    visual.patch_embed = StillPatchEmbed(proj, spec)
    for index, block in enumerate(visual.blocks):
        _replace_vision_attention(block.attn)
        block.attn.looks_through_windows = index not in getattr(visual, "fullatt_block_indexes", (index,))
    fixed = getattr(visual, "interpolation_mode", MODE), getattr(visual, "interpolation_align_corners", ALIGN_CORNERS)
    TRICKS["tower"].require(fixed == (MODE, ALIGN_CORNERS) and takes_precomputed())


def use_fast_parts(model: nn.Module, norm_offset: float = 0.0) -> None:
    """Make every norm and SwiGLU MLP of the model compute in one pass over memory where possible: kernels/gpu,
    kernels/cpu. `norm_offset`: see `ModelFamily`."""
    for module in model.modules():
        kind: Any = type(module)
        if kind.__name__.endswith("RMSNorm"):
            TRICKS["rms_norm"].require(_is_known_norm(kind, norm_offset) and epsilon_of(module) > 0)
            vars(module).update(offset=norm_offset, variance_epsilon=epsilon_of(module))
            replace_forward(module, MethodType(forwards.rms_norm, module))
        elif kind is nn.LayerNorm:
            replace_forward(module, MethodType(forwards.layer_norm, module))
        elif _is_plain_mlp(module):
            TRICKS["swiglu"].require(_is_known_mlp(kind))
            replace_forward(module, MethodType(forwards.swiglu, module))


def _is_plain_mlp(module: nn.Module) -> bool:
    """Tell whether a module should be a SwiGLU MLP: one that has further layers computes something else."""
    is_gated = type(getattr(module, "act_fn", None)).__name__.startswith("SiLU") and hasattr(module, "gate_proj")
    return is_gated and {name for name, _ in module.named_children()} <= {"gate_proj", "up_proj", "down_proj", "act_fn"}


def epsilon_of(norm: Any) -> float:
    """Return an RMSNorm's epsilon, which has two names in transformers; 0 if neither has a number."""
    epsilon: Any = getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None)
    return float(epsilon or 0.0)


def _is_known_norm(kind: Any, offset: float) -> bool:
    with torch.device("cpu"):
        norm, x = kind(8, eps=0.25), torch.arange(16.0).reshape(2, 8)
        if {name for name, _ in norm.named_parameters()} != {"weight"} or epsilon_of(norm) != 0.25:
            return False
        nn.init.constant_(norm.weight, 3.0)
    return torch.allclose(norm(x), (offset + 3.0) * nn.functional.rms_norm(x, (8,), None, 0.25))


def _is_known_mlp(kind: Any) -> bool:
    """Tell whether an MLP class combines its four parts as SwiGLU does, tested with simple functions as the parts."""
    parts = SimpleNamespace(gate_proj=torch.sin, up_proj=torch.cos, down_proj=torch.neg, act_fn=torch.exp)
    with torch.device("cpu"):
        x = torch.arange(8.0)
        try:
            return torch.equal(kind.forward(parts, x), -(x.sin().exp() * x.cos()))
        except (AttributeError, TypeError):  # its forward needs other parts or arguments
            return False


@torch.no_grad()
def materialize(module: nn.Module, vlm: PreTrainedModel, device: torch.device, *, offload: bool) -> None:
    """Move a model to `device` and allocate memory for tensors that have none (device `meta`).

    With `offload` the parameters are on the CPU. Newly allocated buffers get their values, parameters do not. Tied
    parameters stay tied. FSDP's own `_apply` notices that its shards were replaced.
    """
    # By the id of the replaced tensor. The tensor is kept in the value, so that its id is not used again.
    replaced: dict[int, tuple[Tensor, Tensor]] = {}

    def real(tensor: Tensor) -> Tensor:
        target = torch.device("cpu") if offload and isinstance(tensor, nn.Parameter) else device
        if not tensor.is_meta:
            return tensor.to(target)
        if id(tensor) not in replaced:
            new = torch.empty_like(tensor, device=target)
            replaced[id(tensor)] = (tensor, new if isinstance(tensor, nn.Parameter) else new.fill_(torch.nan))
        return replaced[id(tensor)][1]

    module._apply(real)
    vlm.tie_weights()
    for part in vlm.modules():
        if any(True for _ in part.buffers(recurse=False)) and not any(True for _ in part.parameters()):
            vlm._init_weights(part)
    TRICKS["empty"].require(all(bool(buffer.isfinite().all()) for buffer in vlm.buffers()))


def check_torch() -> None:
    """Raise ValueError if the installed torch lacks something that the kernels and this module need from it."""
    if torch.backends.mkldnn.is_available():
        operator = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
        TRICKS["onednn"].require(operator is not None and _arguments(operator.default) == LINEAR_POINTWISE)
    products = (torch.ops.aten.mm, torch.ops.aten.addmm)
    TRICKS["addmm"].require(all(hasattr(product, "dtype_out") for product in products))
    probe = nn.Identity()
    replace_forward(probe, lambda input: -input)
    TRICKS["own_forward"].require(probe(1) == -1)


def check_varlen() -> None:
    """Raise ValueError if the installed torch has no variable-length attention with the options that the learner
    uses."""
    try:
        from torch.nn.attention.varlen import varlen_attn

        arguments = {*inspect.signature(varlen_attn).parameters}
    except ImportError:
        arguments = set()
    TRICKS["varlen"].require({"scale", "window_size"} <= arguments)


def adapt_to_compile(vlm: PreTrainedModel) -> None:
    """Prepare a model for compiled blocks.

    Attention stays outside of the graphs: document borders differ in each microbatch and would cause a new compilation.
    """
    _register(torch.compiler.disable(packed_attention))
    use_plain_linear(vlm)


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Give the module a forward of its own, which takes precedence over its class's."""
    module.forward = forward


def change_class(module: nn.Module, kind: type[nn.Module]) -> None:
    """Turn the module into an object of `kind`, a subclass of its class, with that class's forward. Raise ValueError if
    torch does not allow it."""
    vars(module).pop("forward", None)  # a forward set by `use_fast_linear` would take precedence over the class's
    try:
        module.__class__ = kind
    except TypeError:
        TRICKS["own_class"].require(False)


def stand_in(module: nn.Module, kind: type[nn.Module], **attributes: Any) -> Any:
    """Return an object of `kind` with the attributes of `module`, except its parameters, and with these `attributes`.

    Gradients flow through tensors among the attributes. Raise ValueError if the forward of `kind` would not see them.
    """
    other = kind.__new__(kind)
    other.__dict__ = module.__dict__ | {"_parameters": {}} | attributes
    TRICKS["stand_in"].require(all(getattr(other, name) is value for name, value in attributes.items()))
    return other


def _register(attention: Callable[..., Any]) -> None:
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION, attention)


def _is_known_decoder(text: Any) -> bool:
    parts = ("embed_tokens", "rotary_emb", "layers", "norm")
    if not all(hasattr(text, name) for name in parts):
        return False
    return all("position_embeddings" in inspect.signature(type(layer).forward).parameters for layer in text.layers)


def _replace_attention(attention: Any) -> None:
    """Replace the forward of an attention that normalises its queries and keys; leave any other as it is."""
    if hasattr(attention, "q_norm"):
        TRICKS["attention"].require(_has(attention, forwards.ATTENTION_PARTS, forwards.ATTENTION_ARGUMENTS))
        replace_forward(attention, MethodType(forwards.text_attention, attention))


def _replace_delta_net(net: Any) -> None:
    """Replace the forward of a gated delta net; None: the layer has none."""
    if net is not None:
        TRICKS["delta_net"].require(_has(net, forwards.DELTA_NET_PARTS, ("hidden_states",)))
        replace_forward(net, MethodType(forwards.delta_net, net))


def _replace_vision_attention(attention: Any) -> None:
    TRICKS["vision_attention"].require(
        _has(attention, forwards.VISION_ATTENTION_PARTS, forwards.VISION_ATTENTION_ARGUMENTS)
    )
    replace_forward(attention, MethodType(forwards.vision_attention, attention))


def _has(module: Any, parts: Sequence[str], arguments: Sequence[str]) -> bool:
    accepted = inspect.signature(module.forward).parameters.keys()
    return all(hasattr(module, name) for name in parts) and {*arguments} <= accepted


def _replace_layer(layer: Any) -> None:
    mixes = hasattr(layer, "self_attn") or hasattr(layer, "linear_attn")
    TRICKS["layer"].require(mixes and all(hasattr(layer, name) for name in forwards.LAYER_PARTS))
    replace_forward(layer, MethodType(forwards.decoder_layer, layer))


def _arguments(operator: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in operator._schema.arguments)
