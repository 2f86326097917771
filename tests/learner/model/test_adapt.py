"""Each private part of torch and transformers that the learner needs is refused in one line when it is gone."""

from __future__ import annotations

import ast
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch
import torch.nn.attention.varlen
from torch import nn

from learner.model.adapt import TRICKS, adapt, change_class, check_torch, check_varlen, materialize, stand_in
from learner.model.expert_load import RouterLoad
from tests.support.paths import ROOT
from tests.support.tiny import load_model, tiny_model_dir


@pytest.fixture
def model(tmp_path):
    return load_model(tiny_model_dir(tmp_path, layers=3))


def without_onednn(monkeypatch, model, spec):
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", torch.ops.aten.addmm)
    check_torch()


def without_addmm(monkeypatch, model, spec):
    monkeypatch.setattr(torch.ops.aten, "addmm", SimpleNamespace())
    check_torch()


def without_own_forward(monkeypatch, model, spec):
    monkeypatch.setattr(nn.Identity, "__call__", lambda self, x: type(self).forward(self, x))
    check_torch()


def without_own_class(monkeypatch, model, spec):
    class Rigid(nn.Linear):
        __slots__ = ("adapter",)

    change_class(nn.Linear(2, 2), Rigid)


def without_stand_in(monkeypatch, model, spec):
    class Packed(nn.Module):
        weight = property(lambda self: None)

    stand_in(nn.Linear(2, 2), Packed, weight=torch.zeros(2, 2))


def without_rms_norm(monkeypatch, model, spec):
    monkeypatch.setattr(type(model.model.language_model.norm), "forward", lambda self, x: x)
    adapt(model, spec)


def without_swiglu(monkeypatch, model, spec):
    monkeypatch.setattr(type(model.model.language_model.layers[0].mlp), "forward", lambda self, x: x)
    adapt(model, spec)


def without_vision_attention(monkeypatch, model, spec):
    del model.model.visual.blocks[0].attn.qkv
    adapt(model, spec)


def without_patch_embed(monkeypatch, model, spec):
    model.model.visual.patch_embed.proj = nn.Linear(3, 4)
    adapt(model, spec)


def without_decoder(monkeypatch, model, spec):
    del model.model.language_model.rotary_emb
    adapt(model, spec)


def without_tower(monkeypatch, model, spec):
    model.model.visual.interpolation_mode = "bicubic"
    adapt(model, spec)


def without_attention(monkeypatch, model, spec):
    del model.model.language_model.layers[0].self_attn.k_norm
    adapt(model, spec)


def without_delta_net(monkeypatch, model, spec):
    model.model.language_model.layers[0].linear_attn = torch.nn.Linear(2, 2)
    adapt(model, spec)


def without_layer(monkeypatch, model, spec):
    del model.model.language_model.layers[-1].post_attention_layernorm
    adapt(model, spec)


def without_routers(monkeypatch, model, spec):
    model.experts = torch.nn.Module()
    model.experts.num_experts = 2
    model.experts.register_parameter("gate_up_proj", torch.nn.Parameter(torch.zeros(2, 4, 4)))
    RouterLoad(model, torch.device("cpu"))


def without_empty(monkeypatch, model, spec):
    monkeypatch.setattr(type(model), "_init_weights", lambda self, module: None)
    materialize(model, model.to("meta"), torch.device("cpu"), offload=False)


def without_varlen(monkeypatch, model, spec):
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", lambda query, key, value, scale: query)
    check_varlen()


@pytest.mark.parametrize("name", sorted(TRICKS))
def test_a_library_that_no_longer_fits_is_refused_in_one_line(name, monkeypatch, model, spec):
    trick = TRICKS[name]
    with pytest.raises(ValueError, match="does not fit: the learner needs") as caught:
        globals()[f"without_{name}"](monkeypatch, model, spec)
    line = str(caught.value)
    assert "\n" not in line and f"{trick.library} {version(trick.library)} " in line and trick.needs in line


def test_the_installed_libraries_fit_and_the_table_names_tests_that_exist(model, spec):
    check_varlen()
    assert adapt(model, spec)
    for trick in TRICKS.values():
        file, _, test = trick.test.partition("::")
        assert f"def {test}" in (ROOT / "tests" / file).read_text(encoding="utf-8"), trick.test


def test_a_stand_in_computes_with_the_given_weights_and_gradients_flow_through_them():
    linear, weight = nn.Linear(3, 2, bias=False), torch.randn(2, 3, requires_grad=True)
    x = torch.randn(4, 3)
    out = nn.Linear.forward(stand_in(linear, nn.Linear, weight=weight, bias=None), x)
    assert torch.equal(out, x @ weight.T)
    assert torch.equal(torch.autograd.grad(out.sum(), weight)[0], x.sum(0).expand(2, 3))


def test_nothing_else_gives_modules_another_forward_or_class():
    """The learner's tricks stand in one module; kernels, which import nothing of it, replace two forwards."""
    allowed = {"learner/model/adapt.py", "kernels/cpu/linear.py", "kernels/cpu/gelu.py"}
    setting = set()
    packages = [ROOT / package for package in ("actor", "kernels", "learner", "shared")]
    for path in (path for package in packages for path in package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            targets = node.targets if isinstance(node, ast.Assign) else []
            if any(isinstance(t, ast.Attribute) and t.attr in ("forward", "__class__", "__dict__") for t in targets):
                setting.add(str(path.relative_to(ROOT)))
    assert setting == allowed
