"""Engines are sent, and an export holds, what the published checkpoints of a model's family have: names and layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from actor.engine.weight_loader import Entry
from learner.checkpoints.hf_export import export
from learner.model.policy import load_policy
from learner.plan.plan_command import main
from learner.weights.gathering import gathered
from learner.weights.verify import WeightVerifier
from shared.families.registry import find_sizes
from shared.vision import VisionSpec
from tests.support.publishing import FAST, assert_same, move, publishing, served
from tests.support.small.families import EXPERT_SIZE, FAMILIES, NUM_EXPERTS, qwen3_moe, qwen25
from tests.support.tiny import running_engine

EXPERTS = "model.language_model.layers.1.mlp.experts"


def policy_of(folder: Path):
    return load_policy(str(folder), VisionSpec.load(folder))


def shapes_in(folder: Path) -> dict[str, list[int]]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - it is no mapping


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def exported(request, tmp_path_factory):
    """(family, the policy of a model made by transformers, the folder to which it was exported)"""
    make, _, _ = FAMILIES[request.param]
    folder = make(tmp_path_factory.mktemp("model"))
    policy, out = policy_of(folder), tmp_path_factory.mktemp("export")
    export(out, gathered(policy), model_path=str(folder))
    return request.param, policy, out


def published_names(family: str, own: set[str]) -> set[str]:
    """Of transformers' parameters, as the hub's files of that family name them."""
    if family != "Qwen2.5-VL":
        return own
    text = {name.replace("model.language_model.", "model.") for name in own if "language_model" in name}
    return text | {name.replace("model.visual.", "visual.") for name in own if "visual" in name} | {"lm_head.weight"}


def test_an_export_has_the_names_and_shapes_of_the_published_checkpoints(exported):
    family, policy, out = exported
    found, own = shapes_in(out), dict(policy.vlm.named_parameters())
    assert {*found} == published_names(family, {*own})
    if family == "Qwen3-VL-MoE":
        hidden = policy.vlm.config.text_config.hidden_size
        assert found[f"{EXPERTS}.gate_up_proj"] == [NUM_EXPERTS, hidden, 2 * EXPERT_SIZE]
        assert found[f"{EXPERTS}.down_proj"] == [NUM_EXPERTS, EXPERT_SIZE, hidden]
    if family == "Qwen2.5-VL":
        assert {"visual.blocks.0.attn.qkv.weight", "model.layers.0.self_attn.q_proj.bias"} <= {*found}


def test_transformers_and_the_learner_read_an_export_back_bit_for_bit(exported):
    family, policy, out = exported
    own = dict(policy.vlm.named_parameters())
    for model in (FAMILIES[family][1].from_pretrained(out, dtype=torch.float32), policy_of(out).vlm):
        loaded = dict(model.named_parameters())
        assert loaded.keys() == own.keys()
        assert [name for name in own if not torch.equal(loaded[name], own[name])] == []


def test_the_plan_reads_an_export(exported, capsys):
    _, policy, out = exported
    assert find_sizes(str(out)).parameters == sum(p.numel() for p in policy.vlm.parameters())
    assert main(["--model", str(out)]) == 0 and str(out) in capsys.readouterr().out


def test_a_mixture_loads_from_either_layout_of_its_experts(tmp_path):
    folder = qwen3_moe(tmp_path)
    own = dict(policy_of(folder).vlm.named_parameters())
    names = [name for name in own if ".experts." in name]
    assert shapes_in(folder)[f"{EXPERTS}.gate_up_proj"][-2:] == [2 * EXPERT_SIZE, 64]  # as transformers holds them
    with safe_open(folder / "model.safetensors", "pt") as file:
        every = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    turned = {name: tensor.mT.contiguous() if name in names else tensor for name, tensor in every.items()}
    save_file(turned, folder / "model.safetensors", metadata={"format": "pt"})
    loaded = dict(policy_of(folder).vlm.named_parameters())
    assert len(names) == 4 and all(torch.equal(loaded[name], own[name]) for name in own)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted({*FAMILIES} - {"Qwen3-VL"}))
def test_the_embedded_engine_takes_a_family_as_it_is_published_and_shows_that_it_holds_it(family, tmp_path, ranks):
    folder = FAMILIES[family][0](tmp_path)
    policy = policy_of(folder)
    verifier = WeightVerifier(policy, str(folder), ranks)
    with running_engine(folder) as (url, app), publishing(policy, ranks, FAST, verifier) as publisher:
        for version, part in enumerate(verifier._parts):
            assert verifier.part == part
            move(policy, 0.01)
            found = publisher.publish(version, [url])
            assert served(found) == (1, 0)
            assert (found["publish/checksum_skipped"], found["publish/unproven"]) == (0, 0)
            assert found["publish/canary_gap"] < 1e-4
        assert_same(app, policy)
        check = app.updates.loader.check
        if family == "Qwen3-VL-MoE":
            wrong = Entry(f"{EXPERTS}.gate_up_proj", torch.float32, (NUM_EXPERTS, 2 * EXPERT_SIZE, 64))
            with pytest.raises(ValueError, match=r"has the shape \[6, 64, 48\], not \[6, 48, 64\]"):
                check([wrong])
        elif family == "Qwen2.5-VL":
            with pytest.raises(ValueError, match=r"no parameter 'model\.language_model\.norm"):
                check([Entry("model.language_model.norm.weight", torch.float32, (64,))])


def test_qwen25_is_sent_under_the_names_that_engines_know(tmp_path):
    names = [name for name, _ in gathered(policy_of(qwen25(tmp_path)))]
    assert [name for name in names if not name.startswith(("visual.", "model.", "lm_head."))] == []
    assert [name for name in names if "language_model" in name or name.startswith("model.visual")] == []
