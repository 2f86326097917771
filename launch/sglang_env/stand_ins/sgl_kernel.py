"""Stands in for `sgl_kernel` on machines without an NVIDIA GPU, where SGLang's CUDA wheel cannot load.

SGLang imports names from here and looks up a few operators while its modules load, and calls none of them when it runs
a Qwen-VL model with torch_native attention: so names exist, operators have a schema and no body, and a call fails.
`convert_weight_packed` must stay undefined: SGLang takes its presence for Intel's AMX kernels.

Goes when SGLang's own `sgl_kernel` imports without CUDA.
"""

import torch

_OPERATORS = (  # that sglang.srt.models.qwen3_5 and what it imports look up at import
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
