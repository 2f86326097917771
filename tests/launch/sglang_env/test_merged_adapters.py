"""What our plugin of SGLang's server makes of an adapter that comes alone, from the files of the server's model."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch

from launch.engines.kinds.sglang_engine import PLUGIN
from learner.checkpoints.hf_export import export
from learner.model.policy import load_policy
from learner.weights.gathering import gathered
from shared.engine.adapter_names import SCALE
from shared.engine.engine_messages import parse_server_info
from tests.support.small.adapted import adapted_policy, sent_alone
from tests.support.small.families import qwen3_moe, qwen25
from tests.support.tiny import tiny_model_dir


@pytest.fixture(scope="module")
def plugin():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PLUGIN)
        yield importlib.import_module("pronk_merged_adapters")


def runner_of(folder, dtype=torch.float32):
    return SimpleNamespace(model_config=SimpleNamespace(model_path=str(folder), dtype=dtype), device="cpu")


@pytest.mark.parametrize(
    ("make", "targets"),
    [
        (tiny_model_dir, ("attention", "dense", "vision")),
        (qwen25, ("attention", "dense", "vision")),
        (qwen3_moe, ("attention", "experts")),
    ],
    ids=["Qwen3-VL", "Qwen2.5-VL", "experts"],
)
def test_it_loads_what_a_merged_publication_would_send_byte_for_byte(plugin, tmp_path, make, targets):
    folder = make(tmp_path / "model")
    policy = adapted_policy(folder, moved=0.05, publish="adapter", targets=targets)
    sent, base = sent_alone(policy), tmp_path / "base"
    export(base, gathered(load_policy(str(folder), policy.spec)), model_path=str(folder))  # laid out as published
    (loaded,) = plugin.merged_with_base([sent[:5], sent[5:]], runner_of(base))
    expected = dict(gathered(policy, policy.adapters.of.keys()))
    for _ in range(2):  # as often as it is asked to
        found = dict(loaded)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_weights_pass_as_they_are(plugin, folder):
    buckets = [[("model.visual.x.weight", torch.ones(2))], [("lm_head.weight", torch.ones(2))]]
    assert plugin.merged_with_base(buckets, runner_of(folder)) is buckets


def test_half_an_adapter_and_one_of_another_model_are_refused_before_anything_is_loaded(plugin, folder, tmp_path):
    sent = sent_alone(adapted_policy(folder, publish="adapter", targets=("dense",)))
    assert sent[0][0] == SCALE
    cases = [
        (sent[1:], folder, f"{SCALE} is missing"),
        (sent[:-1], folder, r"down_proj\.lora_B\.weight is missing"),
        (
            [*sent, ("base_model.model.other.lora_A.weight", torch.ones(1, 2))],
            folder,
            r"other\.lora_A\.weight has no weight",
        ),
        ([*sent, ("lm_head.weight", torch.ones(2))], folder, r"lm_head\.weight has no weight"),
        (sent, tmp_path, "is no folder with weights in safetensors"),
    ]
    for wrong, place, reason in cases:
        with pytest.raises(ValueError, match=reason):
            plugin.merged_with_base([wrong], runner_of(place))


@pytest.mark.parametrize(
    ("info", "takes"),
    [
        ({"engine": "embedded", "takes_adapters": True}, True),
        ({"internal_states": [{"takes_adapters": True}] * 2}, True),
        ({"internal_states": [{"takes_adapters": True}, {}]}, False),
        ({}, False),
        (None, False),
    ],
)
def test_an_engine_takes_adapters_alone_if_all_of_it_says_so(info, takes):
    assert parse_server_info(info).takes_adapters is takes
