"""Adapters in files: checkpoints of them alone, resumed bit for bit; merged and alone, exported; started from."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader

from learner.checkpoints.hf_export import export_checkpoint
from learner.checkpoints.lora_files import CONFIG, TENSORS, save
from learner.checkpoints.restoring import load_checkpoint
from learner.checkpoints.saver import Saver
from learner.export import main
from learner.model.sharding import forward_only
from learner.setup import build_policy, build_trainer
from tests.support.episodes import packed, random_groups
from tests.support.small.adapted import (
    adapted_config,
    adapted_policy,
    adapted_trainer,
    move_adapters,
    recipe_of,
    values_of,
)
from tests.support.small.families import qwen3_moe, qwen25
from tests.support.tiny import tiny_model_dir

pytestmark = pytest.mark.slow
SYNC = {"in_background": False}


def logprobs(policy):
    batch = packed(policy, [t for group in random_groups(policy.spec, 2) for t in group.trajectories])
    return forward_only(policy, batch, 1.0).logprobs


def saved(trainer, ranks, path, recipe):
    saver = Saver(path, trainer, ranks, recipe)
    where = saver.save(3, {"cursor": 5})
    saver.close()
    return where


@pytest.fixture(scope="module")
def checkpoint(folder, ranks, tmp_path_factory):
    """Of a policy whose adapters have moved, in float32."""
    trainer = adapted_trainer(folder, ranks, adapted_config(**SYNC))
    move_adapters(trainer.policy, 0.05)
    return saved(trainer, ranks, tmp_path_factory.mktemp("run"), recipe_of(folder, trainer.config)), trainer


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_exported_computes_bit_for_bit_what_is_trained_and_is_a_plain_model(folder, ranks, tmp_path, dtype):
    """Frozen weights are in the recipe's dtype; the checkpoint holds what is trained alone."""
    learner = adapted_config(export=True, **SYNC)
    recipe = recipe_of(folder, learner)
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"dtype": dtype})})
    trainer = build_trainer(recipe, ranks)
    policy = trainer.policy
    assert {p.dtype for _, p in policy.named_weights()} == {getattr(torch, dtype)}
    before = logprobs(policy)
    move_adapters(policy, 0.05)
    path = saved(trainer, ranks, tmp_path / "run", recipe)
    stored = FileSystemReader(path / "dcp").read_metadata().state_dict_metadata
    assert {name.removeprefix("model.") for name in stored if name.startswith("model.")} == values_of(policy).keys()
    out = tmp_path / "exported"
    export_checkpoint(path, out, model_path="", dtype=getattr(torch, dtype))
    found = logprobs(policy)
    assert (found - before).abs().max() > 0.1
    for each in (out, path / "hf"):
        plain = recipe_of(each, learner.model_copy(update={"lora": type(learner.lora)()}))
        plain = plain.model_copy(update={"model": plain.model.model_copy(update={"dtype": dtype})})
        assert torch.equal(logprobs(build_policy(plain, ranks)), found)


def test_a_resumed_run_continues_with_its_adapters_bit_for_bit(folder, ranks, tmp_path):
    learner = adapted_config(lora={"targets": ("attention", "vision")}, kl_coef=0.1, **SYNC)
    recipe, new = recipe_of(folder, learner), lambda: adapted_trainer(folder, ranks, learner)
    trainer = new()
    spec = trainer.policy.spec
    for step in range(2):
        trainer.step(random_groups(spec, 2, seed=step), version=0)
    path = saved(trainer, ranks, tmp_path, recipe)
    resumed = new()
    initialised = values_of(resumed.policy)
    assert load_checkpoint(path, resumed, ranks, recipe).coordinator == {"cursor": 5}
    for each in (trainer, resumed):
        for step in (2, 3):
            each.step(random_groups(spec, 2, seed=step), version=0)
    expected, found = values_of(trainer.policy), values_of(resumed.policy)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not all(torch.equal(found[name], initialised[name]) for name in expected)


def test_adapters_of_another_base_are_neither_resumed_nor_exported(checkpoint, folder, ranks, tmp_path, capsys):
    path, trainer = checkpoint
    other = tiny_model_dir(tmp_path, seed=1)
    with pytest.raises(ValueError, match="has adapters of another base: its weights have the hash") as told:
        load_checkpoint(path, adapted_trainer(other, ranks, trainer.config), ranks, recipe_of(other, trainer.config))
    assert "\n" not in str(told.value) and "use its base or learner.resume = 'never'" in str(told.value)
    assert main([str(path), "--out", str(tmp_path / "out"), "--model", str(other)]) == 2
    assert "give its base with --model" in capsys.readouterr().err and not (tmp_path / "out").exists()
    again = shutil.copytree(folder, tmp_path / "copy")  # a base is known by its weights, wherever it is
    assert main([str(path), "--out", str(tmp_path / "out"), "--model", str(again)]) == 0


def test_an_adapter_alone_has_the_names_of_peft_and_is_started_from(checkpoint, folder, ranks, tmp_path):
    path, trainer = checkpoint
    assert main([str(path), "--out", str(tmp_path / "adapter"), "--adapter"]) == 0
    config = json.loads((tmp_path / "adapter" / CONFIG).read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 32.0)
    assert config["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    tensors = load_file(tmp_path / "adapter" / TENSORS)
    stem = "base_model.model.model.language_model.layers.0.self_attn.k_proj"
    own = trainer.policy.vlm.model.language_model.layers[0].self_attn.k_proj
    assert torch.equal(tensors[f"{stem}.lora_A.weight"], own.lora_A)
    assert torch.equal(tensors[f"{stem}.lora_B.weight"], own.lora_B)
    assert len(tensors) == 2 * len(trainer.policy.adapters.of)
    started = adapted_policy(folder, adapter=str(tmp_path / "adapter"))
    assert torch.equal(logprobs(started), logprobs(trainer.policy))


def test_an_adapter_for_something_else_is_refused_in_a_line_that_names_the_difference(checkpoint, folder, tmp_path):
    path, _ = checkpoint
    adapter = tmp_path / "adapter"
    export_checkpoint(path, adapter, model_path="", dtype=None, adapter=True)
    original, tensors = json.loads((adapter / CONFIG).read_text()), load_file(adapter / TENSORS)

    def said(where=folder, *, config=None, files=None, **lora) -> str:
        (adapter / CONFIG).write_text(json.dumps(original | (config or {})))
        save_file(tensors if files is None else files, adapter / TENSORS, metadata={} if files else {"base": "beef"})
        with pytest.raises(ValueError, match=r"^learner\.lora\.adapter = ") as told:
            adapted_policy(where, adapter=str(adapter), **lora)
        assert "\n" not in str(told.value)
        return str(told.value)

    few = {name: t for name, t in tensors.items() if ".mlp." not in name}
    wide = {name: t.repeat(1, 2) for name, t in tensors.items()}
    assert "has r = 4, but learner.lora.rank = 2; set it to that" in said(rank=2)
    assert "has lora_alpha = 32.0, but learner.lora.alpha = 8" in said(alpha=8.0)
    assert "is of another model: its base has the hash beef" in said()
    assert "is of other targets: it lacks base_model.model.model.language_model.layers.0.mlp.gate" in said(files=few)
    assert "is of other targets: it has base_model.model.model.language_model.layers.0.mlp" in said(
        files=tensors, targets=("attention",)
    )
    assert "is of another model: base_model.model.model.language_model.layers.0" in said(files=wide)
    assert "has use_dora = True" in said(config={"use_dora": True})
    assert "has init_lora_weights = 'pissa_niter_16', which changed" in said(
        config={"init_lora_weights": "pissa_niter_16"}
    )
    assert "is no LoRA: its peft_type is 'IA3'" in said(config={"peft_type": "IA3"})
    (adapter / CONFIG).write_text(json.dumps(original))
    (adapter / TENSORS).write_bytes(b"nothing")
    with pytest.raises(ValueError, match=f"{TENSORS} cannot be read"):
        adapted_policy(folder, adapter=str(adapter))
    with pytest.raises(ValueError, match=r"is no adapter: .*adapter_config\.json cannot be read"):
        adapted_policy(folder, adapter=str(tmp_path))


def test_a_checkpoint_of_all_weights_has_no_adapter_to_export(folder, ranks, tmp_path, capsys):
    learner = adapted_config(**SYNC)
    recipe = recipe_of(folder, learner.model_copy(update={"lora": type(learner.lora)()}))
    path = saved(build_trainer(recipe, ranks), ranks, tmp_path, recipe)
    assert main([str(path), "--out", str(tmp_path / "out"), "--adapter"]) == 2
    assert "has no adapter: all weights were trained; leave --adapter out" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"learner\.lora\.rank \(it: None, now: 4\)"):
        load_checkpoint(path, adapted_trainer(folder, ranks, learner), ranks, recipe_of(folder, learner))


@pytest.mark.parametrize(
    ("family", "targets"), [(qwen25, ("attention", "dense")), (qwen3_moe, ("attention", "experts"))]
)
def test_adapters_of_other_families_go_out_and_in_again(family, targets, tmp_path):
    """Qwen2.5-VL's tower has MLPs whose linears are called as the decoder's: the config names ours by a pattern."""
    folder = family(tmp_path / "model")
    policy = adapted_policy(folder, moved=0.05, targets=targets)

    save(tmp_path / "adapter", policy.vlm, policy.adapters, dict(policy.vlm.named_parameters()), str(folder))
    config = json.loads((tmp_path / "adapter" / CONFIG).read_text())
    if family is qwen25:
        assert config["target_modules"].startswith(r"model\.language_model\.layers\.\d+\.mlp\.down_proj|")
    else:
        assert config["target_parameters"] == ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    again = adapted_policy(folder, adapter=str(tmp_path / "adapter"), targets=targets)
    for name, each in policy.adapters.of.items():
        pairs = zip(each.factors, again.adapters.of[name].factors, strict=True)
        assert all(torch.equal(mine, theirs) for mine, theirs in pairs), name
