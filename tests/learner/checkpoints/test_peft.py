"""The peft library loads our adapters, and we load its: make test-peft."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForImageTextToText

from learner.checkpoints.lora_files import save
from learner.weights.gathering import gathered
from tests.support.episodes import packed, plain_logprobs, random_trajectory
from tests.support.small.adapted import adapted_policy
from tests.support.small.families import qwen3_moe, qwen25
from tests.support.tiny import load_model, tiny_model_dir

peft = pytest.importorskip("peft", reason="make test-peft installs it")
pytestmark = pytest.mark.slow
CASES = {
    "Qwen3-VL": (tiny_model_dir, ("attention", "dense", "vision"), (64, 96)),
    "Qwen2.5-VL": (qwen25, ("attention", "dense"), (56, 84)),
    "Qwen3-VL-MoE": (qwen3_moe, ("attention", "experts"), (64, 96)),
}


def base_of(folder):
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("case", CASES)
def test_peft_computes_what_we_do_and_merges_what_we_publish(case, tmp_path):
    make, targets, sides = CASES[case]
    folder = make(tmp_path / "model")
    policy = adapted_policy(folder, moved=0.05, targets=targets)
    save(tmp_path / "adapter", policy.vlm, policy.adapters, dict(policy.vlm.named_parameters()), str(folder))
    model = peft.PeftModel.from_pretrained(base_of(folder), tmp_path / "adapter")
    trajectory = random_trajectory(policy.spec, 0, sides=sides)
    with torch.no_grad():
        own = policy(packed(policy, [trajectory]), 1.0).logprobs
        with policy.adapters.off():
            off = policy(packed(policy, [trajectory]), 1.0).logprobs
    theirs = plain_logprobs(model, trajectory, policy.spec)
    torch.testing.assert_close(own, theirs, rtol=0, atol=2e-4)
    assert (own - off).abs().max() > 0.02
    merged = dict(model.merge_and_unload().named_parameters())
    for name, weight in policy.named_weights():
        torch.testing.assert_close(policy.adapters.merged(name, weight), merged[name], rtol=1e-5, atol=1e-5, msg=name)


def test_an_adapter_that_peft_has_made_is_started_from(tmp_path):
    folder = tiny_model_dir(tmp_path)
    names = ["q_proj", "k_proj", "v_proj", "o_proj"]
    settings = peft.LoraConfig(r=4, lora_alpha=32, target_modules=names, init_lora_weights=False)
    model = peft.get_peft_model(load_model(folder), settings)
    model.save_pretrained(tmp_path / "adapter")
    policy = adapted_policy(folder, adapter=str(tmp_path / "adapter"), targets=("attention",))
    merged = dict(model.merge_and_unload().named_parameters())
    for name, weight in gathered(policy):
        torch.testing.assert_close(weight, merged[name], rtol=1e-5, atol=1e-5, msg=name)
