"""Adapters: what they compute and what is trained of them, against plain sums and float64; what is refused."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from pydantic import ValidationError

from kernels.low_rank import merged
from learner.model.lora_adapters import is_factor
from learner.model.lora_attach import attach
from learner.model.policy import empty_policy, load_policy
from learner.model.sharding import forward_only
from learner.training.optim import make_optimizer
from learner.weights.gathering import gathered
from shared.config.lora_section import LoraConfig
from shared.config.recipe import ConfigError, load_recipe
from tests.support.episodes import learner_config, packed, random_groups
from tests.support.small.adapted import adapted_config, adapted_policy, adapted_trainer, move_adapters, values_of
from tests.support.small.families import FAMILIES
from tests.support.tiny import mixture_dir, tiny_model_dir

ALL = ("attention", "dense", "vision")
OTHERS = sorted(name for name in FAMILIES if not name.endswith(("-VL", "-MoE")))


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """Its last layer is trimmed: it has more of them than the deepstack."""
    return tiny_model_dir(tmp_path_factory.mktemp("lora"), layers=3)


def batch_of(policy):
    return packed(policy, [t for group in random_groups(policy.spec, 2) for t in group.trajectories])


def with_merged(policy, folder):
    """A plain policy whose weights are the sums."""
    plain = load_policy(str(folder), policy.spec)
    own = dict(plain.named_weights())
    with torch.no_grad():
        for name, weight in policy.named_weights():
            own[name].copy_(policy.adapters.merged(name, weight))
    return plain


@pytest.mark.parametrize("shapes", [((6, 5), (2, 5), (6, 2)), ((3, 6, 5), (3, 2, 5), (3, 6, 2))])
def test_the_sum_is_that_of_float64_and_rounded_once(shapes):
    torch.manual_seed(0)
    weight, a, b = (torch.randn(shape) for shape in shapes)
    exact = weight.double() + 1.5 * b.double() @ a.double()
    torch.testing.assert_close(merged(weight, a, b, 1.5).double(), exact, rtol=1e-6, atol=1e-6)
    weight, a, b = (x.bfloat16() for x in (weight, a, b))
    exact = (weight.double() + 1.5 * b.double() @ a.double()).bfloat16()
    assert torch.equal(merged(weight, a, b, 1.5), exact)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "mixture", *OTHERS])
def test_logprobs_are_bit_for_bit_those_of_the_merged_model_and_gradients_those_of_its_own(deep, tmp_path, kind):
    """dA = s B' dW and dB = s dW A', in float64, from the gradients dW of all weights of the merged model."""
    makers = {"dense": lambda _: deep, "mixture": lambda _: mixture_dir(deep)}
    folder = (makers.get(kind) or FAMILIES[kind][0])(tmp_path)
    targets = {"mixture": ("attention", "experts"), "Qwen3": ("attention", "dense")}.get(kind, ALL)
    policy = adapted_policy(folder, targets=targets)
    batch = batch_of(policy)
    start = load_policy(str(folder), policy.spec)(batch, 1.0).logprobs
    assert torch.equal(policy(batch, 1.0).logprobs, start)
    move_adapters(policy, 0.05)
    plain = with_merged(policy, folder)
    found, expected = policy(batch, 1.0).logprobs, plain(batch, 1.0).logprobs
    assert torch.equal(found, expected) and (found - start).abs().max() > 0.1
    with policy.adapters.off():
        assert torch.equal(policy(batch, 1.0).logprobs, start)
    weights = torch.randn_like(found)
    for logprobs in (found, expected):
        (logprobs * weights).sum().backward()
    whole = dict(plain.named_weights())
    for name, each in policy.adapters.of.items():
        a, b = each.factors
        gradient, s = whole[name].grad.double(), policy.adapters.scale
        for factor, exact in ((a, b.double().mT @ gradient), (b, gradient @ a.double().mT)):
            assert ((factor.grad - s * exact).norm() / (s * exact).norm()).item() < 2e-6, name
    assert all(p.grad is None for _, p in policy.named_weights())


@pytest.mark.slow
def test_a_step_trains_adapters_and_critic_alone_and_what_is_frozen_has_no_state(deep, spec, ranks):
    trainer = adapted_trainer(deep, ranks, adapted_config(lora={"targets": ALL}))
    policy, before = trainer.policy, values_of(trainer.policy)
    frozen = {name: p.detach().clone() for name, p in policy.named_weights()}
    for seed in range(3):  # A moves when B is no longer 0
        trainer.step(random_groups(spec, 2, seed=seed), version=0)
    assert {name for name in before if name.startswith("vlm.")} == {
        f"vlm.{name}" for name, _ in policy.vlm.named_parameters() if is_factor(name)
    }
    assert all(not torch.equal(p, before[name]) for name, p in values_of(policy).items())
    assert all(torch.equal(p, frozen[name]) for name, p in policy.named_weights())
    named = {p: name for name, p in policy.named_parameters()}
    assert {named[p] for p in trainer.optimizer.state} == before.keys()
    exact = sum(float((policy.adapters.merged(n, w) - w).double().square().sum()) for n, w in frozen.items()) ** 0.5
    exact /= sum(float(frozen[name].double().square().sum()) for name in policy.adapters.of) ** 0.5
    assert policy.adapters.relative_norm() == pytest.approx(exact, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [{"activation_checkpointing": True}, {"offload": True, "freeze": ("vision",)}, {"compile": True}]
)
def test_how_memory_is_saved_changes_nothing_that_is_trained(folder, spec, ranks, more, monkeypatch):
    """Compiled with dynamo alone: what it cannot trace shows without the minutes of inductor."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    trained = []
    for changes in ({}, more):
        trainer = adapted_trainer(folder, ranks, adapted_config(**changes))
        for seed in range(2):
            trainer.step(random_groups(spec, 2, seed=seed), version=0)
        trained.append(
            {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in values_of(trainer.policy).items()}
        )
    for name, p in trained[0].items():
        torch.testing.assert_close(trained[1][name], p, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("terms", [{"kl_coef": 0.1}, {"hold_coef": 0.5, "hold_probability": 0.51}])
def test_the_reference_is_the_model_with_its_adapters_off_and_no_second_copy(folder, spec, ranks, terms):
    """Its metrics are those that a second model, which never had adapters, gives."""
    trainer = adapted_trainer(folder, ranks, adapted_config(**terms))
    copy = adapted_trainer(folder, ranks, adapted_config(**terms))
    copy.reference = load_policy(str(folder), trainer.policy.spec).requires_grad_(False)
    for each in (trainer, copy):
        move_adapters(each.policy, 0.05)
    batch = batch_of(trainer.policy)
    said = forward_only(trainer.reference, batch, 1.0).logprobs
    assert torch.equal(said, forward_only(copy.reference, batch, 1.0).logprobs)
    assert trainer.policy.adapters.switch.on and trainer.reference.policy is trainer.policy
    found, expected = (each.step(random_groups(spec, 2), version=0) for each in (trainer, copy))
    for name in ("reference/kl", "reference/hold", "optim/grad_norm"):
        assert found.get(name) == (pytest.approx(expected[name], rel=1e-5) if name in expected else None)
    assert abs(found.get("reference/kl", 0.0)) + found.get("reference/hold", 0.0) > 0


def test_only_adapted_weights_are_gathered_where_they_are_asked_for(folder):
    policy = adapted_policy(folder, moved=0.1, targets=("dense",))
    names = [name for name, _ in gathered(policy, policy.adapters.of.keys())]
    assert len(names) == 6 and all(".mlp." in name for name in names)
    plain = dict(load_policy(str(folder), policy.spec).named_weights())
    for name, weight in gathered(policy):
        assert torch.equal(weight, plain[name]) == (name not in names)


def test_a_model_of_bfloat16_has_frozen_weights_of_that_dtype_and_tied_ones_stay_so(folder, spec):
    policy = empty_policy(str(folder), spec)
    policy.adapters = attach(policy.vlm, LoraConfig(rank=4), torch.bfloat16)
    assert {p.dtype for _, p in policy.named_weights()} == {torch.bfloat16}
    assert policy.vlm.lm_head.weight is policy.vlm.model.language_model.embed_tokens.weight
    groups = make_optimizer(policy, learner_config().optimizer).param_groups
    assert {p.dtype for group in groups for p in group["params"]} == {torch.float32}


# ---------------------------------------------------------------------- what is refused

WRONG = [
    ({"rank": 0}, "rank = 0: an adapter has a rank of at least 1; leave it out to train all weights"),
    ({"rank": 4, "alpha": 0.0}, "alpha = 0: nothing would be added, or the opposite; set it above 0"),
    ({"rank": 4, "alpha": -1.0}, "alpha = -1: "),
    ({"rank": 4, "targets": ()}, "targets is empty"),
    ({"rank": 4, "targets": ("atention",)}, "Input should be 'attention', 'dense', 'experts' or 'vision'"),
    ({"adapter": "x"}, "adapter = 'x' without learner.lora.rank"),
    ({"publish": "adapter"}, "publish = 'adapter' without learner.lora.rank: there is no adapter to send"),
    ({"rank": 4, "publish": "alone"}, "Input should be 'merged' or 'adapter'"),
]
CONTRADICTIONS = [
    ({"optimizer": "muon"}, {}, "learner.optimizer.name = 'muon' with learner.lora"),
    ({"freeze_layers": 1}, {}, "freeze_layers = 1 with learner.lora: adapters are trained in all layers"),
    ({"freeze": ("projector",)}, {"targets": ("vision",)}, "freeze = ['projector'] with 'vision' in learner.lora"),
    ({"kl_coef": 0.1, "kl_reference_every": 3}, {}, "kl_reference_every = 3 with learner.lora"),
    ({"expert": 2}, {}, "learner.parallel.expert = 2 with learner.lora"),
]


@pytest.mark.parametrize(("settings", "reason"), WRONG, ids=str)
def test_settings_of_no_adapter_are_refused(settings, reason):
    with pytest.raises(ValidationError) as refusal:
        LoraConfig(**settings)
    (error,) = refusal.value.errors()
    assert reason in error["msg"] and "\n" not in error["msg"]


@pytest.mark.parametrize(("changes", "lora", "reason"), CONTRADICTIONS, ids=lambda value: str(value)[:40])
def test_settings_that_adapters_contradict_are_refused(changes, lora, reason):
    with pytest.raises(ValidationError) as refusal:
        adapted_config(lora=lora, **changes)
    (error,) = refusal.value.errors()
    assert reason in error["msg"] and "\n" not in error["msg"]


def test_the_command_line_names_what_is_wrong_with_it():
    recipe = "launch/recipes/colour_tiny.toml"
    assert load_recipe(recipe, ["--learner.lora.rank", "8"]).learner.lora.scale == 4.0
    with pytest.raises(ConfigError, match=r"^learner.lora.rank = 0: an adapter has a rank of at least 1"):
        load_recipe(recipe, ["--learner.lora.rank", "0"])
    with pytest.raises(ConfigError, match=r"learner.lora.targets.*should be 'attention'"):
        load_recipe(recipe, ["--learner.lora.rank", "8", "--learner.lora.targets", '["head"]'])


@pytest.mark.parametrize(
    ("engine", "reason"),
    [
        ({"engine.device": "cuda"}, "learner.device = 'cpu' and engine.device = 'cuda': sums are rounded alike on"),
        ({"learner.device": "cuda"}, "learner.device = 'cuda' and engine.device = 'cpu': sums are rounded alike on"),
        ({"engine.kind": "sglang", "engine.stage_weights": "off"}, "engine.stage_weights = 'off': the plugin that"),
    ],
)
def test_adapters_alone_are_refused_for_engines_that_would_not_merge_them_alike(engine, reason):
    fields = {"learner.lora.rank": "8", "learner.lora.publish": "adapter"} | engine
    options = [part for key, value in fields.items() for part in (f"--{key}", value)]
    with pytest.raises(ConfigError, match=f"^learner.lora.publish = 'adapter' with {reason}[^\n]*$"):
        load_recipe("launch/recipes/colour_tiny.toml", options)
    fields["learner.lora.publish"] = "merged"
    load_recipe("launch/recipes/colour_tiny.toml", [p for key, value in fields.items() for p in (f"--{key}", value)])


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            {"rank": 4, "targets": ("experts",)},
            "targets: 'experts' matches nothing in this qwen3_vl model; leave it out",
        ),
        (
            {"rank": 999},
            r"rank = 999 is above the smallest dimension of model\.language_model\..*; set it to \d+ at most",
        ),
    ],
)
def test_what_does_not_fit_the_model_is_refused_before_it_is_changed(folder, spec, settings, reason):
    policy = empty_policy(str(folder), spec)
    with pytest.raises(ValueError, match=f"^learner.lora.{reason}"):
        attach(policy.vlm, LoraConfig(**settings), torch.float32)
    assert all(p.requires_grad for p in policy.parameters())
