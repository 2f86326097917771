"""What rows of the layouts that people bring become: every part of a row is sent as it says, or counted by its name."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from envs import show
from envs.datasets import data_uri, load_dataset
from envs.geo3k import build_env
from envs.row_files import count_rows, write_rows
from tests.support.odd_images import photo, saved

PNG = saved(photo(), "PNG")
BLUE = saved(Image.new("RGB", (40, 40), "blue"), "PNG")
URI = data_uri(PNG)
QUESTION = "Find x in the figure."


def loaded(tmp_path: Path, rows: list[dict], name="rows.jsonl", **settings):
    write_rows(tmp_path / name, rows)
    return load_dataset(tmp_path / name, **settings)


def shape(message):
    """A message's role and parts, with texts as they are."""
    content = message["content"]
    if isinstance(content, str):
        return message["role"], content
    return message["role"], [part.get("text", part["type"]) for part in content]


# ---------------------------------------------------------------------- chat messages


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_content_parts_of_chat_messages_are_read(tmp_path, suffix):
    parts = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    rows = [{"problem": [{"role": "user", "content": parts}], "answer": "60", "images": [URI]}]
    data = loaded(tmp_path, rows, f"rows{suffix}")
    (sample,) = data.samples
    assert [shape(message) for message in sample.prompt] == [("user", ["image", QUESTION])]
    assert len(sample.images) == 1 and data.report.summary() == "1 samples of 1 rows"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": URI},
        {"type": "image_url", "image_url": {"url": URI}},
        {"type": "image_url", "image_url": URI},
        {"type": "image", "path": "pic.png"},
        {"type": "input_image", "image_url": URI},
    ],
)
def test_a_part_may_bring_its_image(tmp_path, part):
    (tmp_path / "pic.png").write_bytes(PNG)
    rows = [{"problem": [{"role": "user", "content": [{"type": "text", "text": "see"}, part, "x?"]}], "answer": "60"}]
    (sample,) = loaded(tmp_path, rows).samples
    assert shape(sample.prompt[0]) == ("user", ["see", "image", "x?"])
    assert sample.images[0].data == PNG


def test_few_shot_and_system_messages_are_kept_as_written(tmp_path):
    problem = [
        {"role": "system", "content": "You are a tutor."},
        {"role": "user", "content": "What is 1+1?"},
        {"role": "assistant", "content": " It is \\boxed{2}.\n"},
        {"role": "user", "content": f"<image>{QUESTION}"},
    ]
    (sample,) = loaded(
        tmp_path, [{"problem": problem, "answer": "60", "images": [URI]}], system_prompt="Box it."
    ).samples
    assert [shape(message) for message in sample.prompt] == [
        ("system", "Box it.\n\nYou are a tutor."),
        ("user", ["What is 1+1?"]),
        ("assistant", " It is \\boxed{2}.\n"),
        ("user", ["image", QUESTION]),
    ]


def test_images_without_marks_come_first_in_the_last_question(tmp_path):
    problem = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "x?"},
    ]
    (sample,) = loaded(tmp_path, [{"problem": problem, "answer": "60", "images": [URI]}]).samples
    assert [shape(message)[1] for message in sample.prompt] == [["1+1?"], "2", ["image", "x?"]]


@pytest.mark.parametrize(
    ("problem", "kind", "words"),
    [
        ([{"role": "user", "content": [{"type": "video"}]}], "bad_rows", "of type 'video': text and images are read"),
        ([{"role": "user", "content": "x?"}, {"role": "assistant", "content": "60"}], "bad_rows", "would stand in the"),
        ([{"role": "boss", "content": "x?"}], "bad_rows", "not a dict with a role"),
        ([{"role": "user", "content": 7}], "bad_rows", "content is int"),
        ([{"role": "user", "content": [{"type": "image"}, "x?"]}], "bad_images", "1 <image> marks, but 0 images"),
        ("<image1> and <image3>?", "bad_images", "a mark <image1>, but 0 images"),
    ],
)
def test_messages_of_another_form_leave_their_row_out(tmp_path, problem, kind, words):
    report = loaded(tmp_path, [{"problem": "y?", "answer": "1"}, {"problem": problem, "answer": "1"}]).report
    assert (report.samples, getattr(report, kind)) == (1, 1)
    assert "row 1: " in report.summary() and words in report.summary()


# ---------------------------------------------------------------------- images


@pytest.mark.parametrize("empty", [None, [], "", {"bytes": None, "path": None}])
def test_image_counts_where_images_is_empty(tmp_path, empty):
    (sample,) = loaded(tmp_path, [{"problem": "x?", "answer": "1", "images": empty, "image": URI}]).samples
    assert [image.data for image in sample.images] == [PNG]


@pytest.mark.parametrize(
    "mark",
    ["<image1>", "<image 1>", "<IMAGE>", "<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>", "<|image|>"],
)
def test_marks_of_other_layouts_become_the_image(tmp_path, mark):
    (sample,) = loaded(tmp_path, [{"problem": f"See {mark}: x?", "answer": "1", "images": [URI]}]).samples
    assert shape(sample.prompt[0]) == ("user", ["See ", "image", ": x?"])


def test_numbered_marks_name_their_images(tmp_path):
    rows = [
        {"problem": "<image2> then <image1> and <image2>", "answer": "1", "images": [URI, data_uri(BLUE)]},
        {"problem": "<image1> alone", "answer": "1", "images": [URI, data_uri(BLUE)]},
    ]
    data = loaded(tmp_path, rows)
    assert [image.data for image in data.samples[0].images] == [BLUE, PNG, BLUE]
    assert data.report.bad_images == 1 and "row 1: image 2 of 2 has no mark <image2>" in data.report.summary()


@pytest.mark.parametrize(
    ("image", "words"),
    [
        ("https://example.org/a.png", "'https://example.org/a.png' is an address, and URLs are not fetched"),
        (data_uri(saved(photo(), "GIF")), "a GIF; PNG, JPEG and WebP are read"),
        (data_uri(saved(photo(), "TIFF")), "a TIFF; "),
        ("none.png", "is no file"),
        ({"0": URI}, "an image is a dict with 0, not with bytes or path"),
    ],
)
def test_an_image_that_cannot_be_read_is_called_by_its_name(tmp_path, image, words):
    rows = [{"problem": "y?", "answer": "1"}, {"problem": "x?", "answer": "1", "images": [image]}]
    report = loaded(tmp_path, rows).report
    assert report.bad_images == 1 and report.is_alarming
    assert f"row 1: {words}" in report.summary() or words in report.summary()


def test_base64_and_file_addresses_are_read(tmp_path):
    (tmp_path / "pic.png").write_bytes(PNG)
    bare = URI.partition(",")[2]
    for image in (bare, f"file://{tmp_path / 'pic.png'}", URI.replace("png;", "png;charset=utf-8;")):
        (sample,) = loaded(tmp_path, [{"problem": "x?", "answer": "1", "images": [image]}]).samples
        assert sample.images[0].data == PNG


def test_a_few_rows_left_out_of_many_are_no_alarm(tmp_path):
    rows = [{"problem": f"{n}?", "answer": "1"} for n in range(300)]
    assert not loaded(tmp_path, [*rows, {"problem": "", "answer": "1"}]).report.is_alarming
    assert loaded(tmp_path, [*rows, *({"problem": "", "answer": "1"} for _ in range(4))]).report.is_alarming


# ---------------------------------------------------------------------- what is not used


@pytest.mark.parametrize(
    ("row", "unused"),
    [
        ({"problem": QUESTION, "answer": "60", "images": [URI], "extra_info": {"env_config": {"difficulty": 3}}},
         {"problem": 1, "answer": 1, "images": 1}),
        ({"problem": "<image>x", "answer": "1", "images": [URI], "image": data_uri(BLUE)}, {"image": 1}),
        ({"problem": "x", "answer": "1", "videos": ["a.mp4"]}, {"videos": 1}),
        ({"problem": [{"role": "user", "content": "x", "tool_calls": [{"a": 1}]}], "answer": "1"},
         {"message tool_calls": 1}),
        ({"problem": [{"role": "user", "content": [{"type": "image", "image": URI}, "x"]}], "answer": "1",
          "images": [data_uri(BLUE)]}, {"images": 1}),
        ({"problem": "x", "answer": "1", "source": "where it is from"}, {}),
    ],
)  # fmt: skip
def test_what_of_a_row_is_not_used_is_counted_by_its_name(tmp_path, row, unused):
    report = loaded(tmp_path, [row]).report
    assert dict(report.unused) == unused and report.samples == 1
    for name in unused:
        assert f"1 with unused {name}" in report.summary() and f"row 0: {name} is not used" in report.summary()


# ---------------------------------------------------------------------- layouts by name


def written_images(tmp_path):
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "1.png").write_bytes(PNG)
    return "images/1.png"


LAYOUTS = {
    "geometry3k": [{"images": [{"bytes": PNG, "path": None}], "problem": f"<image>{QUESTION}", "answer": "60"}],
    "MATH-V": [
        {"id": "1", "question": f"{QUESTION}\n<image1>", "options": ["30", "60"], "image": "images/1.png",
         "decoded_image": {"bytes": PNG, "path": None}, "answer": "B", "solution": None, "level": 2},
    ],
    "MathVista": [
        {"pid": "1", "question": QUESTION, "image": "images/1.png", "decoded_image": {"bytes": PNG, "path": "1.png"},
         "choices": ["30", "60"], "unit": None, "precision": 1.0, "answer": "60", "question_type": "multi_choice",
         "metadata": {"category": "math"}, "query": "Hint: …"},
    ],
    "verl": [
        {"data_source": "hiyouga/geometry3k", "prompt": [{"role": "user", "content": f"<image>{QUESTION}"}],
         "images": [{"bytes": PNG, "path": None}], "ability": "math",
         "reward_model": {"style": "rule", "ground_truth": "60"},
         "extra_info": {"split": "train", "index": 0, "answer": "60", "question": QUESTION}},
    ],
    "TRL": [
        {"prompt": [{"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": QUESTION}]}],
         "image": {"bytes": PNG, "path": None}, "solution": "$60$"},
    ],
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_well_known_layouts_are_loaded_shown_and_graded(tmp_path, layout):
    written_images(tmp_path)
    data = loaded(tmp_path, LAYOUTS[layout], "rows.parquet")
    (sample,) = data.samples
    assert data.report.unused == {}
    (message,) = sample.prompt
    assert [image.data for image in sample.images] == [PNG]
    assert QUESTION in "".join(part.get("text", "") for part in message["content"])
    assert "<image" not in str(message)
    if layout in ("MATH-V", "MathVista"):
        assert sample.metadata["choices"] == ["30", "60"]
        assert message["content"][-1]["text"].endswith("\nChoices:\n(A) 30\n(B) 60")
    env = build_env(sample)
    env.reset()
    assert env.step(rf"\boxed{{{sample.label.strip('$')}}}")[2]["reward"] == 1.0
    out = tmp_path / "episode.png"
    (tmp_path / "answers.txt").write_text("\\boxed{60}\n")
    rows = str(tmp_path / "rows.parquet")
    options = ["--data", rows, "--answers", str(tmp_path / "answers.txt"), "--out", str(out)]
    assert show.main(["envs.geo3k", *options]) == 0
    with Image.open(out) as strip:
        assert (np.asarray(strip.convert("RGB")) == (255, 0, 0)).all(-1).sum() >= 16 * 8  # the photo's red corner


@pytest.mark.parametrize("layout", ["TRL", "verl"])
def test_json_lines_of_peers_are_read(tmp_path, layout):
    row = {key: value for key, value in LAYOUTS[layout][0].items() if key not in ("image", "images")}
    data = loaded(tmp_path, [row | {"images": [URI]}])
    assert len(data.samples[0].images) == 1
    assert "read as problem = prompt, answer = " in data.report.summary()


def test_columns_are_named_by_the_recipe(tmp_path):
    row = {
        "q": "x?",
        "meta": {"gold": "60"},
        "opts": ["a", "b"],
        "pic": URI,
        "problem": "not this",
        "answer": "nor this",
    }
    columns = {"problem": "q", "answer": "meta.gold", "choices": "opts", "image": "pic"}
    for name in ("rows.jsonl", "rows.parquet"):
        (sample,) = loaded(tmp_path, [row], name, columns=columns).samples
        assert shape(sample.prompt[0]) == ("user", ["image", "x?\nChoices:\n(A) a\n(B) b"])
        assert (sample.label, sample.metadata["choices"]) == ("60", ["a", "b"])
    text = row | {"meta": json.dumps({"gold": "60"})}  # as verl's converters write it
    assert loaded(tmp_path, [text], "text.parquet", columns=columns).samples[0].label == "60"


def test_a_missing_column_is_refused_with_its_cure(tmp_path):
    write_rows(tmp_path / "rows.jsonl", [{"q": "x?", "a": "1"}])
    with pytest.raises(ValueError, match="no column problem and no column answer; it has: q, a; name the columns"):
        load_dataset(tmp_path / "rows.jsonl")
    with pytest.raises(ValueError, match=r"no column gold; it has: q, a; data\.columns names it for the answer"):
        load_dataset(tmp_path / "rows.jsonl", columns={"problem": "q", "answer": "gold"})


@pytest.mark.parametrize(
    ("options", "choices", "lines"),
    [
        (["30", "60"], ["30", "60"], "\nChoices:\n(A) 30\n(B) 60"),
        (["A. 30", "B. 60"], ["30", "60"], "\nChoices:\n(A) 30\n(B) 60"),
        (["(a) 30", "(b) 60"], ["30", "60"], "\nChoices:\n(A) 30\n(B) 60"),
        ({"A": "30", "B": "60"}, ["30", "60"], "\nChoices:\n(A) 30\n(B) 60"),
        (["A", "B"], ["A", "B"], ""),
        ([], None, ""),
        (None, None, ""),
    ],
)
def test_choices_are_lettered_lines_of_the_prompt_and_kept_for_the_grader(tmp_path, options, choices, lines):
    (sample,) = loaded(tmp_path, [{"question": "x?", "answer": "A", "options": options}]).samples
    assert shape(sample.prompt[0]) == ("user", [f"x?{lines}"])
    assert sample.metadata.get("choices") == choices


def test_choices_may_be_images(tmp_path):
    row = {"question": "Which?", "answer": "B", "options": ["<image1>", "<image2>"], "images": [URI, data_uri(BLUE)]}
    (sample,) = loaded(tmp_path, [row]).samples
    assert shape(sample.prompt[0])[1] == ["Which?\nChoices:\n(A) ", "image", "\n(B) ", "image"]
    assert len(sample.images) == 2


# ---------------------------------------------------------------------- files


@pytest.mark.parametrize(
    "values",
    [
        pyarrow.array([0, 2**62, 0], pyarrow.timestamp("us")),
        pyarrow.array([0, 2**40, 0], pyarrow.timestamp("s")),
        pyarrow.array([1, 2**30, 1], pyarrow.date32()),
        pyarrow.array([0, 2**62, 0], pyarrow.duration("s")),
        pyarrow.array([1, 1, 1], pyarrow.timestamp("ns")),
        pyarrow.array([1, 1, 1], pyarrow.timestamp("s", tz="Mars/Olympus")),
        pyarrow.array([datetime.date(2026, 1, 1)] * 3),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_columns_that_nobody_reads_may_hold_anything(tmp_path, values, nested):
    columns = {"problem": ["x?", "y?", "z?"], "answer": ["1", "2", "3"]}
    if nested:
        columns["extra_info"] = pyarrow.StructArray.from_arrays([values], ["when"])
    else:
        columns["when"] = values
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "rows.parquet")
    assert load_dataset(tmp_path / "rows.parquet").report.samples == 3


def test_a_value_of_a_read_column_that_python_cannot_hold_leaves_its_row_out(tmp_path):
    answers = pyarrow.array([0, 2**40, 5], pyarrow.timestamp("s"))
    table = pyarrow.table({"problem": ["x?", "y?", "z?"], "answer": answers})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    report = load_dataset(tmp_path / "rows.parquet").report
    assert (report.rows, report.bad_rows) == (3, 1) and "row 1: " in report.summary()


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path):
    row = json.dumps({"problem": "one", "answer": "1"})
    (tmp_path / "rows.jsonl").write_text("\ufeff" + row + "\n", encoding="utf-8")
    assert load_dataset(tmp_path / "rows.jsonl").report.summary() == "1 samples of 1 rows"


def test_a_folder_and_a_pattern_are_read_in_the_order_of_their_names(tmp_path):
    for number in (2, 0, 1):
        write_rows(tmp_path / "data" / f"train-{number}.parquet", [{"problem": f"shard {number}", "answer": "1"}])
    (tmp_path / "data" / "README.md").write_text("x")
    expected = ["train-0-0", "train-1-0", "train-2-0"]
    for path in (tmp_path / "data", tmp_path / "data" / "train-*.parquet"):
        assert [sample.id for sample in load_dataset(path).samples] == expected
        assert count_rows(path) == 3
    assert [sample.id for sample in load_dataset(tmp_path / "data", most=2).samples] == expected[:2]
    write_rows(
        tmp_path / "data" / "train-3.parquet", [{"problem": "", "answer": "1"}, {"problem": "shard 0", "answer": "1"}]
    )
    report = load_dataset(tmp_path / "data").report
    assert (report.rows, report.empty, report.duplicates) == (5, 1, 1)
    assert "train-3.parquet row 0: no problem" in report.summary()


def test_a_folder_of_several_splits_is_refused(tmp_path):
    for name in ("train-0", "test-0"):
        write_rows(tmp_path / f"{name}.parquet", [{"problem": name, "answer": "1"}])
    with pytest.raises(ValueError, match=r"has files of test and train: name one, such as .*/train\*"):
        load_dataset(tmp_path)
    (tmp_path / "none").mkdir()
    for path in (tmp_path / "none", tmp_path / "none*.parquet"):
        with pytest.raises(ValueError, match=r"without \.parquet|no dataset file"):
            load_dataset(path)


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "<image>Find x."}]
SHAREGPT = [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "<image>Find x."}]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": CHAT, "answer": "3"},
        {"messages": CHAT, "solution": "3"},
        {"conversations": SHAREGPT, "answer": "3"},
        {"problem": json.dumps(CHAT), "answer": "3"},
        {"problem": str(CHAT), "answer": "3"},
        {"problem": [{**CHAT[0], "role": "developer"}, {**CHAT[1], "role": "human"}], "answer": "3"},
        {"problem": [CHAT[0], {"role": "user", "content": {"type": "text", "text": "<image>Find x."}}], "answer": "3"},
    ],
)
def test_messages_are_read_in_the_forms_of_other_trainers(tmp_path, row):
    (tmp_path / "rows.jsonl").write_text(json.dumps({**row, "images": [URI]}), encoding="utf-8")
    (sample,) = load_dataset(tmp_path / "rows.jsonl").samples
    system, question = sample.prompt
    assert (system["role"], system["content"], sample.label) == ("system", "Be brief.", "3")
    assert [part.get("text", part["type"]) for part in question["content"]] == ["image", "Find x."]


@pytest.mark.parametrize("options", ["['1', '2']", '["1", "2"]', "A. 1\nB. 2", '{"A": "1", "B": "2"}'])
def test_choices_are_read_from_a_text(tmp_path, options):
    row = {"question": "Find x.", "answer": "B", "options": options}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row), encoding="utf-8")
    (sample,) = load_dataset(tmp_path / "rows.jsonl").samples
    assert sample.metadata["choices"] == ["1", "2"]


def test_a_mark_of_a_video_is_counted(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"problem": "<video>Find x.", "answer": "3"}), encoding="utf-8")
    assert load_dataset(tmp_path / "rows.jsonl").report.unused == {"<video> mark": 1}
