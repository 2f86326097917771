"""A replacement for `sgl_kernel` on machines without an NVIDIA GPU, where SGLang's CUDA wheel cannot be loaded.

While its modules load, SGLang imports names from this package and looks up a few operators; it calls none of them when
it runs a Qwen-VL model with torch_native attention. So all names exist, operators have a schema and no body, and any
call fails. `convert_weight_packed` must stay undefined: SGLang concludes from its presence that Intel's AMX kernels are
there.

To be removed when SGLang's own `sgl_kernel` can be imported without CUDA.
"""

import torch

_OPERATORS = (  # looked up when sglang.srt.models.qwen3_5 is imported
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
    "fused_gdn_gating_cpu",
    "fused_sigmoid_gating_delta_rule_update_cpu",
)
_library = torch.library.Library("sgl_kernel", "DEF")
for _name in _OPERATORS:
    _library.define(f"{_name}(Tensor x) -> Tensor")


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_args, **_kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} needs SGLang's kernels for NVIDIA GPUs")

    return missing
