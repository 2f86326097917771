"""An objective and an optimizer are each one entry with its function, and nothing else of the learner is touched."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
import torch

from learner.model.policy import load_policy
from learner.objective.loss_records import Loss, Tokens
from learner.objective.loss_terms import policy_term, total_loss
from learner.setup import build_trainer
from learner.training.optim import LocalAdamW
from learner.training.trainer import Trainer
from shared.config.learner_section import LearnerConfig, OptimizerConfig
from shared.config.lora_section import LoraConfig
from shared.config.named_functions import load_function
from shared.config.objective_section import ObjectiveConfig
from shared.config.objective_specs import OBJECTIVES, ObjectiveSpec
from shared.config.optimizer_specs import OPTIMIZERS, OptimizerSpec
from shared.config.recipe import load_recipe
from shared.types import Group
from tests.support.episodes import learner_config, random_groups


def reinforce_and_flatten(tokens: Tokens, config: ObjectiveConfig, scaling: object) -> Loss:
    """Plain REINFORCE on the advantage; where that is 0, entropy is sought."""
    term = policy_term(tokens.logprobs, torch.zeros_like(tokens.logprobs), tokens.advantages)
    seek_N = torch.where(tokens.advantages == 0, tokens.entropies, 0.0)
    loss = total_loss(tokens, config, term, tokens.advantages)
    return loss._replace(total=loss.total - (tokens.weights * seek_N).sum())


TOY = ObjectiveSpec(name="toy", loss=reinforce_and_flatten, is_group_relative=True)


@pytest.fixture
def register(monkeypatch):
    return lambda spec: monkeypatch.setitem(OBJECTIVES, spec.name, spec)


def move_of(folder, spec, ranks, groups) -> tuple[float, dict[str, float]]:
    """How far a step of the toy objective moves the weights, and its metrics."""
    policy = load_policy(str(folder), spec)
    before = torch.nn.utils.parameters_to_vector(policy.parameters()).detach().clone()
    config = learner_config(objective="toy", lr=1e-3, weight_decay=0.0)
    metrics = Trainer(policy, config, ranks).step(groups, version=0)
    return float((torch.nn.utils.parameters_to_vector(policy.parameters()).detach() - before).norm()), metrics


def test_episodes_of_zero_advantage_train_an_objective_that_does_not_say_that_they_lose_nothing(
    folder, spec, ranks, register
):
    alike = [msgspec.structs.replace(t, reward=0.5) for t in random_groups(spec, 1, group_size=2)[0].trajectories]
    groups = [Group("g", "a", tuple(alike))]
    register(TOY)
    moved, metrics = move_of(folder, spec, ranks, groups)
    assert moved > 0.0 and metrics["batch/microbatches"] == 1.0
    register(replace(TOY, zero_advantage_means_zero_loss=True))
    moved, metrics = move_of(folder, spec, ranks, groups)
    assert moved == 0.0 and metrics["batch/microbatches"] == 0.0


def test_a_registered_objective_learns_and_a_recipe_is_checked_by_its_entry(folder, spec, ranks, register):
    register(TOY)
    moved, metrics = move_of(folder, spec, ranks, random_groups(spec, 2, group_size=2, turns=1))
    assert moved > 0.0 and metrics["optim/skipped_steps"] == 0.0
    with pytest.raises(ValueError, match="toy compares episodes of one sample"):
        LearnerConfig(objective=ObjectiveConfig(name="toy"), group_size=1)
    with pytest.raises(ValueError, match="critic_width = 8: toy trains no critic"):
        ObjectiveConfig(name="toy", critic_width=8)
    register(replace(TOY, clips=False))
    with pytest.raises(ValueError, match="toy clips no gradient"):
        ObjectiveConfig(name="toy", proximal="learner")


@pytest.mark.parametrize(
    "setting", [{"entropy_coef": 0.1}, {"kl_coef": 0.1}, {"hold_coef": 0.1}], ids=lambda setting: next(iter(setting))
)
def test_a_term_on_all_tokens_keeps_episodes_of_zero_advantage(setting):
    assert ObjectiveConfig(name="grpo").skips_zero_advantage
    assert not ObjectiveConfig(name="grpo", **setting).skips_zero_advantage


def test_names_that_are_not_registered_are_one_line_with_the_cure():
    with pytest.raises(ValueError, match=r"'trpo' is no objective; set it to one of vtrace, .*objective_specs\.py"):
        ObjectiveConfig(name="trpo")
    with pytest.raises(ValueError, match=r"'lion' is no optimizer; set it to one of adamw, .*optimizer_specs\.py"):
        OptimizerConfig(name="lion")
    with pytest.raises(ValueError, match=r"the entry names 'learner\.none:f', which cannot be imported"):
        load_function("learner.none:f", "the entry")
    with pytest.raises(ValueError, match="which is no function"):
        load_function("shared.config.objective_specs:OBJECTIVES", "the entry")


@pytest.mark.parametrize("name", ["", "a.b", "a..b:f", ".a:f", "a:", ":f"])
def test_an_entry_of_another_form_is_told_the_form(name):
    with pytest.raises(ValueError, match=r"^the entry names '.*'; write it as package\.module:function$"):
        load_function(name, "the entry")


@pytest.mark.parametrize("text", ["raise RuntimeError('on\\ntwo lines')", "def f(:", "import nothing_of_that_name"])
def test_a_module_that_fails_while_it_is_imported_is_one_line_that_names_the_entry(tmp_path, monkeypatch, text):
    (tmp_path / "fails_at_import.py").write_text(text + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"^the entry names 'fails_at_import:f', [^\n]*(fails_at_import|nothing_of)"):
        load_function("fails_at_import:f", "the entry")


def test_a_function_that_is_given_itself_has_to_be_one():
    with pytest.raises(ValueError, match="the entry names 3, which is no function"):
        load_function(3, "the entry")


@pytest.mark.parametrize("kind", ["objective", "optimizer"])
def test_what_cannot_be_imported_is_said_before_a_weight_is_read(tmp_path, ranks, monkeypatch, kind):
    monkeypatch.setitem(OBJECTIVES, "typo", ObjectiveSpec(name="typo", loss="learner.objective.objectives:typo"))
    monkeypatch.setitem(OPTIMIZERS, "typo", OptimizerSpec(name="typo", optimizer="learner.training.optim:Typo"))
    words = ["--model.path", str(tmp_path / "no_model"), f"--learner.{kind}.name", "typo"]
    with pytest.raises(ValueError, match=rf"{kind} 'typo' of shared/config/{kind}_specs\.py names .*mend that name"):
        build_trainer(load_recipe("launch/recipes/colour_tiny.toml", words), ranks)


def test_every_entry_names_what_there_is():
    assert all(callable(entry.load_loss()) for entry in OBJECTIVES.values())
    assert all(callable(entry.load_optimizer()) for entry in OPTIMIZERS.values())


class Backwards(LocalAdamW):
    """AdamW that goes up the loss."""

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.neg_()
        super().step(closure)


def test_a_registered_optimizer_moves_the_policy_and_may_refuse_adapters(folder, spec, ranks, monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "back", OptimizerSpec(name="back", optimizer=Backwards, supports_adapters=False))
    groups, moves = random_groups(spec, 2, turns=1), []
    for name in ("adamw", "back"):
        policy = load_policy(str(folder), spec)
        before = torch.nn.utils.parameters_to_vector(policy.parameters()).detach().clone()
        Trainer(policy, learner_config(optimizer=name, lr=1e-3, weight_decay=0.0), ranks).step(groups, version=0)
        moves.append(torch.nn.utils.parameters_to_vector(policy.parameters()).detach() - before)
    torch.testing.assert_close(moves[0], -moves[1], rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match=r"name = 'back' with learner\.lora.*set it to one of adamw"):
        LearnerConfig(optimizer=OptimizerConfig(name="back"), lora=LoraConfig(rank=4))
