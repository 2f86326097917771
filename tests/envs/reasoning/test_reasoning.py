"""What a model writes about a board is paid for when it is true, and not when it is a template."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

from envs import frozen_lake, sokoban
from envs.boards.board import board_of
from envs.boards.solver import solve
from envs.reasoning.board_facts import BoardFacts
from envs.reasoning.forms import TAGS, parts_of
from envs.reasoning.grids import grid_score
from envs.reasoning.relations import claims, relations, relations_score
from shared.types import Sample

BOARDS = 200
WORDS = {"reasoning": "world_model", "form_reward": 0.1, "state_reward": 0.5, "foresight_reward": 0.5}
SOKOBAN = {"boards": "reverse_played", "max_solution": 5, "rewards": "outcome", "render_mode": "text"} | WORDS
ROWS, COLUMNS = ("above", "below", "same row"), ("left", "right", "same column")
PLACES = list(product(ROWS, COLUMNS))


def play(module, seed: int, **args):
    settings = SOKOBAN if module is sokoban else {"render_mode": "text"} | WORDS
    return module.build_env(Sample("x", metadata={"seed": seed}), settings | args)


def described(facts: BoardFacts) -> str:
    """Hand-written words of where everything is."""
    places = relations(facts).items()
    said = [f"the {kind} is {row} and {column} of the player" for kind, pairs in places for row, column in pairs]
    return ", and ".join(said) + "."


def drawn(facts: BoardFacts) -> str:
    return "\n".join(facts.rows)


def after(env, moves: list[str], module) -> BoardFacts:
    position = env.position
    for move in moves:
        position = position.moved(move)
    return module.facts(position)


def answer(observation: str, moves: list[str], prediction: str) -> str:
    seen = f"<observation>{observation}</observation>\n<think>I look, then go.</think>"
    return f"{seen}\n<answer>{', '.join(moves)}</answer>\n<prediction>{prediction}</prediction>"


@pytest.mark.parametrize(("language", "words"), [("relations", described), ("grid", drawn)])
def test_true_words_on_two_hundred_boards_get_all_of_every_reward(language, words):
    for seed in range(BOARDS):
        env = play(sokoban, seed, state_language=language)
        moves = (solve(env.board) or [])[:3]
        said = answer(words(sokoban.facts(env.position)), moves, words(after(env, moves, sokoban)))
        _, done, info = env.step(said)
        assert info["reward"] == pytest.approx(1.1 + env.success), seed
        turn = info["metrics"]["turn_metrics"]
        assert (turn["form_is_valid"], turn["state_accuracy"], turn["prediction_accuracy"]) == (1.0, 1.0, 1.0)
        assert sokoban.episode_reward(env) == pytest.approx(info["reward"])
        assert done == env.success


@pytest.mark.parametrize(("language", "words"), [("relations", described), ("grid", drawn)])
def test_true_words_about_two_hundred_lakes_get_all_of_every_reward(language, words):
    for seed in range(BOARDS):
        env = play(frozen_lake, seed, state_language=language)
        moves = env.solution(env.position)[:3]
        said = answer(words(frozen_lake.facts(env.position)), moves, words(after(env, moves, frozen_lake)))
        _, _, info = env.step(said)
        assert info["reward"] == pytest.approx(1.1 + env.success), (seed, said)


@pytest.mark.parametrize("module", [sokoban, frozen_lake])
def test_no_fixed_sentence_scores_three_tenths_on_two_hundred_boards(module):
    boards = [module.facts(play(module, seed).position) for seed in range(BOARDS)]
    best = 0.0
    for kind in module.KINDS:
        sentences = [f"the {kind} is {row} and {column}" for row, column in PLACES]
        best += max(sum(relations_score(sentence, facts) for facts in boards) for sentence in sentences) / BOARDS
    assert best < 0.3


def test_a_copied_grid_scores_below_three_tenths():
    boards = [sokoban.facts(play(sokoban, seed).position) for seed in range(BOARDS)]
    for template in boards[:20]:
        others = [facts for facts in boards if facts.rows != template.rows]
        assert sum(grid_score(drawn(template), facts) for facts in others) / len(others) < 0.3


def test_claiming_all_places_or_leaving_things_out_does_not_pay():
    facts = sokoban.facts(play(sokoban, 0).position)
    everything = ". ".join(f"the box is {row} and {column}" for row, column in PLACES)
    assert relations_score(everything, facts) < 0.3
    box = described(BoardFacts(facts.player, {"box": facts.things["box"]}, facts.rows))
    assert relations_score(box, facts) == 0.5
    assert relations_score("", facts) == relations_score("I see a game.", facts) == 0.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The box is above and left of the player", [("above", "left")]),
        ("the Box is to the right of and below you.", [("below", "right")]),
        ("box: same row, left", [("same row", "left")]),
        ("The box is directly above the player", [("above", "same column")]),
        ("The box lies north-west of the player", [("above", "left")]),
        ("The box is in the same column, below the player; it is yellow.", [("below", "same column")]),
        ("One box is above and right. Another box is below and left.", [("above", "right"), ("below", "left")]),
        ("The box is above or below and left of the player", [("", "")]),
        ("The box is above the player", [("", "")]),
        ("There is a box.", []),
        ("The target is above and left of the player", []),
        ("The toolbox is above and left of the player", []),
    ],
)
def test_a_place_is_read_from_plain_words(text, expected):
    assert claims(text, ("box", "target"))["box"] == expected


def test_what_is_said_of_one_thing_is_not_taken_for_another():
    said = claims(
        "The box is above and left of the player, and the target is below and same column.", ("box", "target")
    )
    assert said == {"box": [("above", "left")], "target": [("below", "same column")]}


@pytest.mark.parametrize(
    ("reasoning", "text", "has_form"),
    [
        ("none", "<answer>up</answer>", True),
        ("none", "up", False),
        ("free", "<think>so</think> <answer>up</answer>", True),
        ("free", "so</think>\n<answer>up</answer>", True),  # a template has opened the thoughts
        ("free", "<answer>up</answer><think>so</think>", False),
        ("free", "<think>so</think><answer>up</answer><answer>down</answer>", False),
        ("free", "<think>I write <answer>up</answer> then</think><answer>down</answer>", False),
        ("world_model", "<think>so</think><answer>up</answer>", False),
        ("world_model", answer("a", ["up"], "b"), True),
        ("world_model", answer("a", ["up"], "b").replace("</prediction>", ""), False),
    ],
)
def test_an_answer_has_the_form_or_not(reasoning, text, has_form):
    assert (parts_of(text, reasoning) is not None) == has_form


@pytest.mark.parametrize("module", [sokoban, frozen_lake])
@pytest.mark.parametrize("reasoning", ["free", "world_model"])
@pytest.mark.parametrize("language", ["relations", "grid"])
@pytest.mark.parametrize("render_mode", ["vision", "text"])
def test_the_prompt_names_all_parts_of_the_form_and_its_example_has_it(module, reasoning, language, render_mode):
    settings = {"reasoning": reasoning, "state_language": language, "render_mode": render_mode}
    prompt = module.system_prompt(settings)
    assert all(f"<{tag}>" in prompt for tag in TAGS[reasoning])
    if reasoning == "free" or language == "relations":
        assert parts_of(prompt.rpartition("For example: ")[2], reasoning) is not None
    if reasoning == "world_model" and language == "relations":
        assert all(kind in prompt for kind in module.KINDS)


@pytest.mark.parametrize("module", [sokoban, frozen_lake])
def test_an_answer_without_the_form_makes_no_move_and_gets_nothing(module):
    for text in ("<answer>up, down, left</answer>", "up", "", answer("x", [], "y")):
        env = play(module, 3)
        _, done, info = env.step(text)
        assert (env.position, done, info["reward"], info["parsed_actions"]) == (env.board, False, 0.0, [])
        assert info["metrics"]["turn_metrics"]["form_is_valid"] == 0.0
        assert info["raw_action"] == text


def test_an_untrue_prediction_costs_its_reward_alone():
    env = play(sokoban, 0)
    moves = (solve(env.board) or [])[:1]
    wrong = ", and ".join(f"the {kind} is above and below" for kind in sokoban.KINDS)
    _, _, info = env.step(answer(described(sokoban.facts(env.position)), moves, wrong))
    assert info["reward"] == pytest.approx(0.6 + env.success)


def test_several_boxes_are_matched_one_by_one():
    rows = "######", "#X__O#", "#__P_#", "#X__O#", "######"
    board = board_of(5, 6, bytes("#_O√XPS".index(symbol) for row in rows for symbol in row))
    facts = sokoban.facts(board)
    assert relations(facts)["box"] == [("above", "left"), ("below", "left")]
    one = "the box is above and left. the box is above and left. "
    targets = "the target is above and right. the target is below and right."
    assert relations_score(one + targets, facts) == pytest.approx((0.5 + 1) / 2)


@pytest.mark.parametrize("module", [sokoban, frozen_lake])
def test_a_reward_for_words_that_are_not_asked_for_is_refused(module):
    with pytest.raises(ValueError, match=r"state_reward = 0.5 needs reasoning = \"world_model\", not 'free'"):
        module.build_env(None, {"reasoning": "free", "state_reward": 0.5})


def test_hostile_words_score_nothing():
    facts = sokoban.facts(play(sokoban, 0).position)
    texts = ("box " * 50_000, "<observation>" * 5_000, "#" * 100_000, "above left " * 20_000, "box is above " * 9_999)
    for text in texts:
        assert relations_score(text, facts) <= 0.01
        assert grid_score(text, facts) == 0.0
        assert parts_of(text, "world_model") is None
    mixed = "".join(Random(0).choices(("box ", "target ", "above ", "left ", "\n"), k=20_000))
    assert relations_score(mixed, facts) <= 0.1
