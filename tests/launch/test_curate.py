"""A run's best recorded episodes become demonstrations that are, token by token, what was played."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from actor.chat_episode import chat_episode
from actor.render import Renderer
from envs.chat_rows import chat_of
from envs.datasets import data_uri
from launch.curate import main
from launch.sft import write_demonstrations
from learner.recording.recorded_columns import watch
from learner.recording.recorder import Recorder
from shared.config.sections import RecordConfig
from shared.recordings.group_files import files, read
from shared.types import Ending, Group
from tests.support.episodes import joined
from tests.support.small.recorder import folder_of, recipe, ticket_of
from tests.support.tiny import draw_image, png, tiny_tokenizer

__all__ = ["recipe"]  # a fixture


def played(renderer, seed, reward, *, letters=False, cut=False, **changes):
    """An episode of two turns with images. `letters`: the answers are sampled letter by letter; `cut`: the last one is
    cut off."""
    messages = [{"role": "system", "content": "Solve it."}]
    for turn in range(2):
        image = {"type": "image", "image": data_uri(png(draw_image(64, 96, 10 * seed + turn)))}
        text = f"Valid last actions: up, {seed}. An <image> and <|im_end|> are words here."
        ask = {"role": "user", "content": [{"type": "text", "text": f"{turn}:"}, image, {"type": "text", "text": text}]}
        answer = {"role": "assistant", "content": f"<answer>up, {'down' * turn}</answer>"}
        if letters:
            ids = [renderer.tokenizer.encode(letter)[0] for letter in "<answer>up, left</answer>"]
            answer = {"role": "assistant", "content": "<answer>up, left</answer>", "token_ids": [*ids, renderer.end_id]}
        messages += [ask, answer]
    if cut:
        messages[-1] = {
            "role": "assistant",
            "content": "<answer>",
            "token_ids": [*renderer.tokenizer.encode("<answer>")],
        }
    episode = chat_episode(chat_of({"messages": messages}, Path()), renderer, 4096)
    return replace(episode, reward=reward, **changes)


@pytest.fixture(scope="module")
def renderer(spec):
    return Renderer(tiny_tokenizer(), spec)


@pytest.fixture
def run(recipe, renderer, spec):
    """A run whose first step is recorded, by group: rewards (1, 0.5), (0, 2 of letters), (3 failed, 2 of segments),
    (1 cut off)."""
    made = recipe(RecordConfig(every=1, groups=4))
    segments = joined([played(renderer, seed, 1.0) for seed in (20, 21)])
    groups = [
        Group("g0-p", "a", (played(renderer, 0, 1.0), played(renderer, 1, 0.5))),
        Group("g1-p", "a", (played(renderer, 2, 0.0), played(renderer, 3, 2.0, letters=True))),
        Group("g2-p", "a", (played(renderer, 4, 3.0, ending=Ending.ENV_ERROR), segments)),
        Group("g3-p", "a", (played(renderer, 5, 1.0, cut=True, ending=Ending.OUT_OF_TOKENS),)),
    ]
    recorder = Recorder(made, spec)
    recorder.step(1, 0, groups, [ticket_of(group) for group in groups], watch(groups, 1, made.record))
    recorder.close(60)
    return folder_of(made).parent, groups


def curated(run, tmp_path, *words):
    """Return the rows and the summary of the command."""
    out = tmp_path / "best.jsonl"
    assert main([str(run), "--out", str(out), *words]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_what_is_learned_is_what_was_played_token_by_token(run, tmp_path, renderer, capsys):
    folder, groups = run
    rows = curated(folder, tmp_path, "--min-reward", "1")
    said = json.loads(capsys.readouterr().out)
    assert said == {"seen": 6, "episodes": 4, "rows": 5, "left_out": 0, "out": str(tmp_path / "best.jsonl")}
    assert [row["reward"] for row in rows] == [1.0, 2.0, 2.0, 2.0, 1.0]
    assert [row["episode"] for row in rows] == ["g0-p/0", "g1-p/1", "g2-p/1", "g2-p/1", "g3-p/0"]
    write_demonstrations(str(tmp_path / "best.jsonl"), renderer, 4096, tmp_path / "shown")
    learned = [read(path).trajectories[0] for path in files(tmp_path / "shown")]
    whole = groups[2].trajectories[1]
    (_, border), _ = whole.bounds
    expected = [groups[0].trajectories[0], groups[1].trajectories[1], (whole, 0, border), (whole, border, None)]
    expected.append(groups[3].trajectories[0])
    for got, what in zip(learned, expected, strict=True):
        episode, first, stop = what if isinstance(what, tuple) else (what, 0, None)
        assert np.array_equal(got.token_ids, episode.token_ids[first:stop])
        assert np.array_equal(got.loss_mask, episode.loss_mask[first:stop]) and got.loss_mask.any()
        count = int((episode.token_ids[:first] == renderer.image_id).sum())
        assert list(got.images) == list(episode.images[count : count + len(got.images)]) and len(got.images) == 2


def test_only_answers_that_the_text_does_not_spell_so_have_token_ids(run, tmp_path):
    rows = curated(run[0], tmp_path, "--min-reward", "1")
    with_ids = [[("token_ids" in m) for m in row["messages"] if m["role"] == "assistant"] for row in rows]
    assert with_ids == [[False, False], [True, True], [False, False], [False, False], [False, True]]
    assert rows[0]["messages"][0] == {"role": "system", "content": "Solve it."}
    assert rows[0]["messages"][1]["content"][0] == {"type": "text", "text": "0:"}


def test_the_best_of_each_group_or_so_many_are_chosen(run, tmp_path):
    best = curated(run[0], tmp_path / "a", "--min-reward", "0", "--best-of-group")
    assert [row["episode"] for row in best] == ["g0-p/0", "g1-p/1", "g2-p/1", "g2-p/1", "g3-p/0"]
    most = curated(run[0], tmp_path / "b", "--min-reward", "0", "--at-most", "1")
    assert [row["episode"] for row in most] == ["g1-p/1"]


def test_an_episode_that_cannot_be_read_back_as_it_was_played_is_left_out_and_counted(
    recipe, renderer, spec, tmp_path, capsys
):
    made = recipe(RecordConfig(every=1))
    good = played(renderer, 0, 1.0)
    ids = good.token_ids.copy()
    ids[3] = 1  # a prompt that no chat has
    unknown = good.token_ids.copy()
    unknown[good.turns[0].start] = len(renderer.tokenizer) + 1
    groups = [Group("g0-p", "a", (good, replace(good, token_ids=ids), replace(good, token_ids=unknown)))]
    recorder = Recorder(made, spec)
    recorder.step(1, 0, groups, [ticket_of(group) for group in groups], watch(groups, 1, made.record))
    recorder.close(60)
    assert len(curated(folder_of(made).parent, tmp_path, "--min-reward", "1")) == 1
    said = capsys.readouterr()
    assert json.loads(said.out)["left_out"] == 2


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("nowhere", "--min-reward", "0", "--out", "a.jsonl"), "nowhere holds no recorded steps: give the folder of a"),
        (("RUN", "--min-reward", "9", "--out", "a.jsonl"), "has a reward of 9: of 6 the most is 2; lower --min-reward"),
        (("RUN", "--min-reward", "0", "--out", "a.txt"), "--out a.txt: it does not end in .jsonl"),
        (("RUN", "--min-reward", "0", "--model", "nowhere", "--out", "a.jsonl"), "name it with --model"),
    ],
)
def test_a_mistake_is_one_line(run, tmp_path, monkeypatch, capsys, words, expected):
    folder = run[0].resolve()
    monkeypatch.chdir(tmp_path)
    assert main([str(folder) if word == "RUN" else word for word in words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and expected in line
    assert not list(tmp_path.rglob("*.jsonl"))


def test_a_file_that_is_there_is_not_written_over(run, tmp_path, capsys):
    (tmp_path / "best.jsonl").write_text("mine")
    assert main([str(run[0]), "--min-reward", "0", "--out", str(tmp_path / "best.jsonl")]) == 2
    assert "it is there already" in capsys.readouterr().err and (tmp_path / "best.jsonl").read_text() == "mine"
