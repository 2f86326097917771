"""The agents of the documentation's pages play on the small models, and have the tokens that they should have."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest

from shared.config.recipe import Recipe
from shared.types import Ending, Trajectory
from tests.support.agent_examples import example_agent, play_recipe, small, tickets_of
from tests.support.engines import engine_process

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engine(all_starts_forked: None) -> Iterator[object]:
    """Return the address of a fresh engine of a recipe, by which nothing was played before."""
    with ExitStack() as stack:

        def start(recipe: Recipe) -> str:
            words = ["--max-context", str(recipe.model.max_context)]
            words += ["--max-pixels", str(recipe.model.max_pixels)] if recipe.model.max_pixels else []
            return stack.enter_context(engine_process(Path(recipe.model.path), *words)).url

        yield start


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return the name of a page's agent, as a recipe has it."""
    monkeypatch.syspath_prepend(tmp_path)
    return lambda page: f"{example_agent(f'docs/how-to/{page}.md', tmp_path)}:run"


def assert_same(own: list[Trajectory], agents: list[Trajectory], *, by_turns: bool = False) -> None:
    """The episodes of the environment and of the agent have the same tokens, byte for byte, and the same rewards."""
    for one, other in zip(own, agents, strict=True):
        assert one.ending is other.ending, other.error
        assert one.token_ids.tobytes() == other.token_ids.tobytes()
        assert one.loss_mask.tobytes() == other.loss_mask.tobytes()
        assert one.behaviour_logprobs.tobytes() == other.behaviour_logprobs.tobytes()
        assert one.policy_versions.tobytes() == other.policy_versions.tobytes()
        assert one.images == other.images and one.segments == other.segments == ()
        assert [(turn.start, turn.end) for turn in one.turns] == [(turn.start, turn.end) for turn in other.turns]
        assert sum(turn.reward for turn in one.turns) == pytest.approx(other.reward)
        own = [turn.reward for turn in one.turns]
        at_the_end = [0.0] * (len(own) - 1) + [other.reward]
        assert [turn.reward for turn in other.turns] == (own if by_turns else at_the_end)


def test_the_agent_that_plays_sokoban_by_screenshots_has_the_environments_tokens(engine, agent):
    name, played = agent("agent-sokoban"), {}
    for path in ("", name):
        recipe = small("sokoban_tiny", rollout__agent=path)
        cut = small("sokoban_tiny", rollout__agent=path, env__max_tokens=100)
        url = engine(recipe)
        played[path] = [*play_recipe(recipe, url, tickets_of(recipe, 5)), *play_recipe(cut, url, tickets_of(cut, 1))]
    assert_same(played[""], played[name], by_turns=True)
    assert {each.ending for each in played[name]} == {Ending.COMPLETED, Ending.MAX_TURNS, Ending.OUT_OF_TOKENS}


def test_the_program_that_asks_with_curl_plays_and_its_last_line_is_the_reward(engine, tmp_path):
    assert shutil.which("curl"), "the example is of curl: install it"
    page = Path("docs/how-to/agents.md").read_text(encoding="utf-8")
    example = re.search(r"```sh\n(#!/bin/sh\n# (\w+\.sh)\n.*?)```", page, re.DOTALL)
    assert example
    script = tmp_path / example[2]
    script.write_text(example[1])
    script.chmod(0o700)
    recipe = small("colour_tiny", rollout__command=str(script))
    tickets = tickets_of(recipe, 4)
    for ticket, each in zip(tickets, play_recipe(recipe, engine(recipe), tickets), strict=True):
        assert each.ending is Ending.COMPLETED and len(each.turns) == 1, each.error
        asked, _, answer = each.text.partition("<|im_start|>assistant\n")
        assert f"Name a colour. Number {ticket.sample.metadata['seed']}." in asked
        assert each.reward == float("red" in answer)
    assert not [*Path.cwd().glob("answer.*")]


def test_the_agent_with_a_tool_has_the_environments_tokens(engine, agent):
    name, played = agent("agent-tools"), {}
    for path in ("", name):
        recipe = small("scene_zoom_tiny", rollout__agent=path)
        played[path] = play_recipe(recipe, engine(recipe), tickets_of(recipe, 8))
    assert_same(played[""], played[name])
    assert {(len(each.turns), len(each.images), each.reward) for each in played[name]} >= {(2, 2, 1.0), (1, 1, 0.0)}


def test_the_agent_with_a_summary_begins_a_segment_with_each_call(engine, agent):
    recipe = small("sokoban_tiny", rollout__agent=agent("agent-summary"))
    for each in play_recipe(recipe, engine(recipe), tickets_of(recipe, 2)):
        assert each.ending in (Ending.COMPLETED, Ending.MAX_TURNS), each.error
        assert len(each.turns) == len(each.bounds) == len(each.images) >= 5
        first, *later = each.text.split("<|im_start|>system\nSolve Sokoban.<|im_end|>\n")[1:]
        assert "Moves so far" not in first and len(later) == len(each.turns) - 1
        moves = [words.split("Moves so far: ")[1].split("\n")[0].split(", ") for words in later]
        assert all(after[: len(before)] == before for before, after in pairwise(moves))
        assert len(moves[0]) < len(moves[-1])


def test_the_agent_of_a_framework_goes_on_in_the_policys_tokens(engine, agent):
    pytest.importorskip("agents", reason="make test-clients installs it")
    name, played = agent("agent-framework"), {}
    for path in ("", name):
        recipe = small("scene_zoom_tiny", rollout__agent=path)
        played[path] = play_recipe(recipe, engine(recipe), tickets_of(recipe, 8))
    for own, other in zip(played[""], played[name], strict=True):
        assert other.ending is Ending.COMPLETED and not other.segments and other.metrics["agent_refused"] == 0
        asked = own.turns[0].end  # up to the picture, which a framework's client sends in a message of its own
        assert own.token_ids[:asked].tobytes() == other.token_ids[:asked].tobytes()
        assert own.behaviour_logprobs[:asked].tobytes() == other.behaviour_logprobs[:asked].tobytes()
        assert own.images == other.images and len(own.turns) == len(other.turns)
    assert {len(each.turns) for each in played[name]} == {1, 2}
