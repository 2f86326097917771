"""The attention kernel fits the GPU, or the recipe is refused in one line that says what to set."""

from __future__ import annotations

import pytest
import torch
import torch.nn.attention.varlen

from learner.model import attention
from learner.model.attention_backend import activate, choose
from tests.support.gpu.varlen import lower_right

NONE: frozenset[str] = frozenset()
FLASH3 = frozenset({"flash_attn_interface"})
A100, H200, B200, NEXT, V100 = (8, 0), (9, 0), (10, 0), (14, 0), (7, 0)


@pytest.mark.parametrize(
    ("setting", "dtype", "capability", "installed", "chosen"),
    [
        ("auto", "bfloat16", None, NONE, "sdpa"),
        ("auto", "float32", H200, FLASH3, "sdpa"),
        ("auto", "bfloat16", V100, NONE, "sdpa"),
        ("auto", "bfloat16", A100, NONE, "flash2"),
        ("auto", "bfloat16", H200, FLASH3, "flash2"),
        ("auto", "bfloat16", B200, NONE, "flash2"),
        ("flash3", "bfloat16", H200, FLASH3, "flash3"),
        ("flash4", "bfloat16", B200, frozenset({"flash_attn.cute"}), "flash4"),
        ("sdpa", "bfloat16", NEXT, NONE, "sdpa"),
    ],
)
def test_a_kernel_that_runs_is_chosen(setting, dtype, capability, installed, chosen):
    assert choose(setting, dtype, capability, installed) == chosen


@pytest.mark.parametrize(
    ("setting", "dtype", "capability", "installed", "message"),
    [
        ("flash3", "bfloat16", B200, FLASH3, "runs on compute capability 9.x, this GPU has 10.0; .* = 'flash2'"),
        ("flash3", "bfloat16", H200, NONE, "needs the module flash_attn_interface; install it, or .* = 'flash2'"),
        ("flash4", "bfloat16", B200, NONE, "needs the module flash_attn.cute; install it, or set .* = 'flash2'"),
        (
            "auto",
            "bfloat16",
            NEXT,
            NONE,
            "no flash attention is known .* 14.0; set learner.parallel.attention = 'sdpa'",
        ),
        ("flash2", "bfloat16", V100, NONE, "this GPU has 7.0; set learner.parallel.attention = 'sdpa'"),
        ("flash2", "float32", H200, NONE, "this is float32 on a GPU; set it to 'auto'"),
        ("flash3", "bfloat16", None, FLASH3, "this is bfloat16 on a CPU; set it to 'auto'"),
    ],
)
def test_a_kernel_that_cannot_run_is_refused_with_what_to_set(setting, dtype, capability, installed, message):
    with pytest.raises(ValueError, match=message) as error:
        choose(setting, dtype, capability, installed)
    assert "\n" not in str(error.value)


def test_on_a_cpu_attention_is_sdpas():
    assert activate("auto", "bfloat16", torch.device("cpu")) == "sdpa"
    with pytest.raises(ValueError, match="on a CPU"):
        activate("flash2", "bfloat16", torch.device("cpu"))


@pytest.mark.parametrize(("causal", "window"), [(True, (-1, 0)), (False, (7, 7))])
def test_full_attention_has_a_window_so_that_torch_does_not_take_cudnn_for_it(monkeypatch, causal, window):
    """cuDNN's attention builds a plan for each new shape, and keeps it; torch takes it where there is no window."""
    asked = {}

    def varlen_attn(query, *_, **how):
        asked.update(how)
        return query

    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", varlen_attn)
    q, k = torch.zeros(3, 2, 64), torch.zeros(7, 2, 64)
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32) for n in (3, 7))
    attention._of_documents(q, k, k, cu_q, cu_k, 3, 7, 0.1, causal)
    assert asked["window_size"] == window


def test_a_kernel_whose_masks_end_elsewhere_than_at_the_lower_right_is_refused(monkeypatch):
    monkeypatch.setattr(attention, "_of_documents", lower_right)
    attention.check_masks(torch.device("cpu"))

    def upper_left(q, k, v, cu_q, cu_k, *rest):
        first = torch.cat(
            [torch.arange(a, a + n) for a, n in zip(cu_k[:-1].tolist(), cu_q.diff().tolist(), strict=True)]
        )
        return lower_right(q, k[first], v[first], cu_q, cu_q, rest[0], rest[0], *rest[2:])

    monkeypatch.setattr(attention, "_of_documents", upper_left)
    with pytest.raises(ValueError, match=r"fewer queries than keys; set learner\.parallel"):
        attention.check_masks(torch.device("cpu"))
