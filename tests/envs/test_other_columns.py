"""Several files as one dataset, with weights, and the columns of a row that describe it."""

from __future__ import annotations

import datetime
import json
from collections import Counter
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from envs.datasets import load_dataset, weighted
from envs.row_files import write_rows
from envs.show import main as show
from shared.types import Sample

NAMED = {"answer": "gold", "problem": "q"}


def metadata_of(path: Path, **settings: Any) -> dict[str, Any]:
    (sample,) = load_dataset(path, **settings).samples
    return sample.metadata


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_all_other_columns_are_the_samples_metadata(tmp_path: Path, suffix: str) -> None:
    row = {"q": "x?", "gold": "1", "difficulty": 3, "tags": ["a", "b"], "meta": {"level": 0.5}, "none": None, "row": 99}
    write_rows(tmp_path / f"rows.{suffix}", [row])
    found = metadata_of(tmp_path / f"rows.{suffix}", columns=NAMED)
    assert found == {"row": 0, "difficulty": 3, "tags": ["a", "b"], "meta": {"level": 0.5}}


def test_a_column_that_is_too_large_is_counted_by_its_name(tmp_path: Path) -> None:
    row = {"problem": "x?", "answer": "1", "trace": "x" * 5000, **{f"part{n}": "y" * 4000 for n in range(5)}}
    write_rows(tmp_path / "rows.jsonl", [row])
    data = load_dataset(tmp_path / "rows.jsonl")
    assert data.samples[0].metadata.keys() == {"row", "part0", "part1", "part2", "part3"}
    assert dict(data.report.unused) == {"trace": 1, "part4": 1}


def test_cells_without_a_plain_form_cost_no_row(tmp_path: Path) -> None:
    """Dates and decimals become texts; bytes are not read; invalid text and dates out of range are left out."""
    columns = {
        "problem": pyarrow.array(["x?", "y?"]),
        "answer": pyarrow.array(["1", "2"]),
        "day": pyarrow.array([datetime.date(2024, 5, 1)] * 2),
        "price": pyarrow.array([Decimal("1.50")] * 2),
        "blob": pyarrow.array([b"\x00", b"\x01"]),
        "broken": pyarrow.Array.from_buffers(pyarrow.string(), 2, pyarrow.array([b"\xff", b"ok"]).buffers()),
        "late": pyarrow.array([2**62, 0], pyarrow.timestamp("us")),
    }
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "rows.parquet")
    data = load_dataset(tmp_path / "rows.parquet")
    first, second = (sample.metadata for sample in data.samples)
    assert first == {"row": 0, "day": "2024-05-01", "price": "1.50"}
    assert second == {"row": 1, "day": "2024-05-01", "price": "1.50", "broken": "ok", "late": "1970-01-01 00:00:00"}
    assert data.report.bad_rows == 0


def files(tmp_path: Path) -> list[str]:
    for folder, count in (("a", 2), ("b", 4)):
        write_rows(
            tmp_path / folder / "train.jsonl", [{"problem": f"{folder}{n}?", "answer": "1"} for n in range(count)]
        )
    return [str(tmp_path / "a" / "train.jsonl"), str(tmp_path / "b" / "*.jsonl")]


def test_a_list_of_files_and_patterns_is_one_dataset_in_which_ids_differ(tmp_path: Path) -> None:
    samples = load_dataset(files(tmp_path)).samples
    assert [sample.id for sample in samples] == ["a/train-0", "a/train-1", *(f"b/train-{n}" for n in range(4))]


def test_a_pattern_that_matches_nothing_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no dataset file matches '.*none-") as refused:
        load_dataset([*files(tmp_path), str(tmp_path / "none-*.jsonl")])
    assert "\n" not in str(refused.value)


def test_a_column_that_is_not_there_is_answered_by_the_nearest(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl", [{"question": "x?", "gold": "1"}])
    with pytest.raises(ValueError, match="has no column questoin; did you mean question"):
        load_dataset(tmp_path / "rows.jsonl", columns={"problem": "questoin", "answer": "gold"})


@pytest.mark.parametrize(
    ("weights", "counts"),
    [((), (2, 4)), ((1, 1), (4, 4)), ((1, 3), (2, 6)), ((3, 1), (12, 4)), ((0.5, 0.5), (4, 4)), ((1, 100), (2, 200))],
)
def test_each_of_several_sources_has_the_share_of_its_weight(
    weights: tuple[float, ...], counts: tuple[int, int]
) -> None:
    groups = [[Sample(f"{name}{n}") for n in range(count)] for name, count in (("a", 2), ("b", 4))]
    found = Counter(sample.id for sample in weighted(groups, weights))
    assert tuple(sum(n for name, n in found.items() if name[0] == group) for group in "ab") == counts
    for group in "ab":  # each sample as often as the others of its source, or once more
        times = [n for name, n in found.items() if name[0] == group]
        assert max(times) - min(times) <= 1


def test_weights_that_repeat_without_measure_are_refused() -> None:
    groups = [[Sample("a")], [Sample("b")]]
    with pytest.raises(ValueError, match="repeat small sources beyond 50,000,000"):
        weighted(groups, (1e-9, 1.0))


def test_a_rows_metadata_reaches_json(tmp_path: Path) -> None:
    line = '{"problem": "x?", "answer": "1", "big": 1' + "0" * 30 + ', "nan": NaN, "lone": "\\ud800"}'
    (tmp_path / "rows.jsonl").write_text(line)
    data = load_dataset(tmp_path / "rows.jsonl")
    assert json.loads(json.dumps(data.samples[0].metadata)) == {"row": 0, "lone": "?"}
    assert dict(data.report.unused) == {"big": 1, "nan": 1}


def test_tools_that_show_a_row_take_the_columns_as_a_run_does(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "What is 1 + 1?", "gold": "2"}\n')

    def shown(*columns: str) -> str:
        show(["envs.geo3k", "--data", str(rows), "--out", str(tmp_path / "shown.png"), *columns])
        captured = capsys.readouterr()
        return captured.out + captured.err

    for columns in (
        ("--data.columns", '{"prompt": "question", "answer": "gold"}'),
        ("--data.columns.prompt", "question", "--data.columns.answer", "gold"),
    ):
        assert "1 turns" in shown(*columns)
    for value, named in (
        ('{"promt": "question"}', "did you mean 'prompt'"),
        ('{"prompt": 3}', "write the column's name"),
    ):
        assert f"error: --data.columns.{next(iter(json.loads(value)))}" in (told := shown("--data.columns", value))
        assert named in told and told.count("\n") == 1
