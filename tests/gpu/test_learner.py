"""A learner's step on a GPU beside the same step on the CPU, and what only a GPU has: flash attention, waits for the
host, pinned memory."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F

from learner.batch.episodes import make_episodes
from learner.batch.prefetch import prefetch
from learner.checkpoints.restoring import load_checkpoint
from learner.checkpoints.saver import Saver
from learner.metrics.throughput import Clock
from learner.metrics.token_metrics import TokenStats
from learner.model import attention
from learner.objective.advantages import Scaling
from learner.setup import build_trainer
from learner.training.precomputed import PrecomputedColumns
from learner.training.step_totals import StepTotals
from learner.training.update import accumulate_gradient
from shared.config.recipe import Recipe, load_recipe
from tests.support.episodes import random_groups, siblings
from tests.support.learner_ranks import first_gradients_noted, whole
from tests.support.small.families import FAMILIES

RECIPE = "launch/recipes/colour_tiny.toml"
OBJECTIVES: dict[str, dict[str, object]] = {
    "vtrace": {"name": "vtrace", "critic_width": 16, "entropy_coef": 0.01},
    "turns": {"name": "vtrace", "vtrace_level": "turn"},
    "grpo": {"name": "grpo", "kl_coef": 0.1, "aggregation": "sequence_mean"},
    "ppo": {"name": "ppo", "minibatches": 2, "proximal": "learner"},
}


def recipe_of(folder, objective="vtrace", **fields) -> Recipe:
    values = {f"learner.objective.{name}": value for name, value in OBJECTIVES[objective].items()}
    values |= {"model.path": folder, "model.max_context": 1024, "learner.optimizer.warmup_steps": 0}
    values |= {"learner.group_size": 2 if objective == "grpo" else 1, "learner.parallel.microbatch_tokens": 400}
    arguments = [part for key, value in (values | fields).items() for part in (f"--{key}", str(value))]
    return load_recipe(RECIPE, arguments)


def groups_of(trainer, sides, seed=0):
    size = trainer.config.group_size
    groups = random_groups(trainer.decoder.spec, 4, group_size=size, seed=seed, turns=2, sides=sides)
    return groups + random_groups(trainer.decoder.spec, 1, group_size=size, seed=seed + 9, turns=1, with_images=False)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    make, _, sides = FAMILIES[request.param]
    return make(tmp_path_factory.mktemp("model")), sides


def siblings_of(trainer, sides):
    return [siblings(trainer.decoder.spec, trainer.config.group_size, seed=s, turns=2, sides=sides) for s in range(4)]


def stepped(recipe, ranks, sides, groups=groups_of):
    """(first gradients, metrics) of a step."""
    trainer = build_trainer(recipe, ranks)
    with first_gradients_noted(trainer) as found:
        metrics = trainer.step(groups(trainer, sides), 1)
    return {name: gradient.double().cpu() for name, gradient in found.items()}, metrics


def off(ours, truth):
    """Of all gradients together: the norm of the difference, by that of the truth."""
    squares = sum(float((ours[name] - truth[name]).square().sum()) for name in truth)
    return (squares / sum(float(g.square().sum()) for g in truth.values())) ** 0.5


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_step_in_float32_is_that_of_the_cpu(model, objective, ranks, on_cpu):
    folder, sides = model
    recipe = recipe_of(folder, objective)
    (ours, metrics), (truth, expected) = (stepped(recipe, where, sides) for where in (ranks, on_cpu))
    assert ours.keys() == truth.keys()
    assert off(ours, truth) < 1e-4
    for name in ("loss/policy", "optim/grad_norm", "policy/entropy", "behaviour/logprob_gap/lag_1"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name


def test_a_step_in_bfloat16_is_near_that_of_the_cpu_in_float32(model, ranks, on_cpu):
    folder, sides = model
    attention.use_varlen(True)
    ours, _ = stepped(recipe_of(folder, **{"model.dtype": "bfloat16"}), ranks, sides)
    truth, _ = stepped(recipe_of(folder), on_cpu, sides)
    assert off(ours, truth) < 0.1


@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_tokens_that_a_group_begins_with_alike_are_computed_once_with_the_same_gradients(
    model, ranks, on_cpu, dtype, most
):
    """Beside whole episodes on the CPU in float32; in bfloat16 by flash attention with fewer queries than keys."""
    folder, sides = model
    attention.use_varlen(True)
    ours, metrics = stepped(recipe_of(folder, "grpo", **{"model.dtype": dtype}), ranks, sides, siblings_of)
    whole = recipe_of(folder, "grpo", **{"learner.parallel.share_prefixes": False})
    truth, _ = stepped(whole, on_cpu, sides, siblings_of)
    assert metrics["batch/prefix_share"] > 0.1
    assert off(ours, truth) < most


@pytest.mark.parametrize("changes", [
    {"learner.parallel.activation_checkpointing": True},
    {"learner.parallel.offload": True},
    {"learner.parallel.offload": True, "learner.optimizer.name": "muon"},
    {"learner.parallel.compile": True},
    {"learner.lora.rank": 4, "learner.lora.targets": '["attention", "dense"]'},
], ids=["activations computed again", "offloaded", "offloaded, by Muon", "compiled", "adapters"])  # fmt: skip
def test_what_saves_memory_or_time_changes_no_gradient(changes, tmp_path, ranks, on_cpu):
    """Beside the CPU's in float32, with a tolerance of bfloat16's."""
    make, _, sides = FAMILIES["Qwen3-VL"]
    folder = make(tmp_path)
    ours, _ = stepped(recipe_of(folder, **changes, **{"model.dtype": "bfloat16"}), ranks, sides)
    adapters = {name: value for name, value in changes.items() if "lora" in name}
    truth, _ = stepped(recipe_of(folder, **adapters), on_cpu, sides)
    assert off({name.replace("_orig_mod.", ""): g for name, g in ours.items()}, truth) < 0.1


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "key_heads", "size"), [(4, 2, 64), (16, 8, 128), (2, 2, 32)])
def test_flash_attention_over_packed_documents_is_that_of_each_alone(heads, key_heads, size, causal):
    lengths = [1, 7, 128, 300, 2]
    torch.manual_seed(0)
    total = sum(lengths)
    q, k, v = (torch.randn(1, n, total, size, device="cuda").bfloat16() for n in (heads, key_heads, key_heads))
    upstream = torch.randn(total, heads, size, device="cuda")

    def gradients(function, *inputs):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        out = function(*leaves)
        (out * upstream.to(out.dtype)).sum().backward()
        return [out.detach().double(), *(x.grad.double() for x in leaves)]

    def alone(q, k, v):
        parts = zip(*(x.split(lengths, 2) for x in (q, k, v)), strict=True)
        rows = [F.scaled_dot_product_attention(*part, is_causal=causal, enable_gqa=True) for part in parts]
        return torch.cat(rows, 2)[0].transpose(0, 1)

    cu = torch.tensor([0, *lengths], device="cuda").cumsum(0, dtype=torch.int32)

    def packed(q, k, v):
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        return attention._of_documents(q, k, v, cu, cu, max(lengths), max(lengths), size**-0.5, causal)

    ours = gradients(packed, q, k, v)
    truth = gradients(alone, *(x.double() for x in (q, k, v)))
    for value, exact in zip(ours, truth, strict=True):
        assert float((value - exact).norm()) < 1e-2 * float(exact.norm())


def test_a_microbatch_waits_for_the_gpu_at_most_twice(tmp_path, ranks):
    make, _, sides = FAMILIES["Qwen3-VL"]
    trainer = build_trainer(recipe_of(make(tmp_path), **{"model.dtype": "bfloat16"}), ranks)
    groups = groups_of(trainer, sides)
    trainer.step(groups, 1)  # compiles
    episodes = make_episodes(groups, trainer.decoder, trainer.config.objective)
    scaling = Scaling().on(ranks.device)
    totals = StepTotals(
        1, scaling, Clock(ranks.device), TokenStats(ranks.device), TokenStats(ranks.device), PrecomputedColumns()
    )
    with prefetch(trainer.packer.pack, [episodes], ranks.device) as batches:
        for number, batch in enumerate(batches):
            torch.cuda.synchronize()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                try:
                    accumulate_gradient(batch, 10, trainer.models, totals, last=False)
                finally:
                    torch.cuda.set_sync_debug_mode("default")
            waits = [f"{w.filename}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)]
            assert len(waits) <= 2, (number, waits)


def test_a_run_that_goes_on_from_a_checkpoint_ends_where_an_uninterrupted_one_does(tmp_path, ranks):
    make, _, sides = FAMILIES["Qwen3-VL"]
    recipe = recipe_of(make(tmp_path / "model"), **{"learner.optimizer.name": "muon", "run.dir": tmp_path})
    first, second = build_trainer(recipe, ranks), build_trainer(recipe, ranks)
    for step in range(2):
        first.step(groups_of(first, sides, seed=20 * step), 1)
    saver = Saver(tmp_path / "checkpoints", first, ranks, recipe)
    path = saver.save(2, {})
    saver.wait()
    saver.close()
    load_checkpoint(path, second, ranks, recipe)
    begun = {name: whole(p) for name, p in second.policy.named_parameters()}
    for trainer in (first, second):
        trainer.step(groups_of(trainer, sides, seed=40), 1)
    for (name, ours), theirs in zip(first.policy.named_parameters(), second.policy.parameters(), strict=True):
        torch.testing.assert_close(whole(theirs), whole(ours), rtol=1e-4, atol=1e-6, msg=name)
    assert any(not torch.equal(begun[name], whole(p)) for name, p in second.policy.named_parameters())
