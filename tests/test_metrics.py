"""What is written can be read back by TensorBoard, and aggregates are what they say."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as PILImage
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from learner.metrics.writer import MetricLogger
from shared.log import get_logger
from shared.metrics import Distribution, means


def test_scalars_images_and_texts_are_read_back_by_tensorboard(tmp_path: Path) -> None:
    red = np.zeros((4, 6, 3), np.uint8) + np.uint8([255, 0, 0])
    logger = MetricLogger(tmp_path / "run")
    logger.scalars(1, {"reward": np.float32(0.5), "loss": float("nan")})
    logger.scalars(2, {"reward": 1})
    logger.image(2, "board", red)
    logger.text(2, "sample", "**hello**")
    logger.close()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["reward"]) for row in rows] == [(1, 0.5), (2, 1.0)]
    assert rows[0]["loss"] is None
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward")] == [(1, 0.5), (2, 1.0)]
    image = events.Images("board")[0]
    assert (image.width, image.height) == (6, 4)
    assert PILImage.open(io.BytesIO(image.encoded_image_string)).getpixel((5, 3)) == (255, 0, 0)
    assert events.Tensors("sample/text_summary")[0].tensor_proto.string_val == [b"**hello**"]


def test_the_values_of_a_step_are_one_event(tmp_path: Path) -> None:
    logger = MetricLogger(tmp_path)
    for step in (1, 2):
        logger.scalars(step, {f"value_{i}": float(i) for i in range(100)})
    logger.close()
    (path,) = (tmp_path / "tensorboard").iterdir()
    events = [event for event in EventFileLoader(str(path)).Load() if event.HasField("summary")]
    assert [(event.step, len(event.summary.value)) for event in events] == [(1, 100), (2, 100)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's own thread
def test_tensorboard_goes_on_when_a_full_disk_has_room_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("learner.metrics.writer.RETRY_S", 0.0)
    logger = MetricLogger(tmp_path)
    logger.scalars(0, {"reward": 0.0})
    logger.flush()
    (full,) = (tmp_path / "tensorboard").iterdir()
    full.unlink()
    full.symlink_to("/dev/full")
    step, deadline = 0, time.monotonic() + 20
    while len(list((tmp_path / "tensorboard").iterdir())) < 2:
        assert time.monotonic() < deadline
        step += 1
        logger.scalars(step, {"reward": float(step)})
        logger.flush()
    full.unlink()
    logger.scalars(1000, {"reward": 1000.0})
    logger.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Scalars("reward")[-1].step == 1000
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == step + 2


@pytest.mark.parametrize("cut_off", ["", '{"step": 2, "ti'])
def test_a_restarted_run_appends_and_a_line_that_a_kill_has_cut_off_stays_alone(tmp_path: Path, cut_off: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "x": 1.0}\n' + cut_off)
    logger = MetricLogger(tmp_path)
    logger.scalars(2, {"x": 2.0})
    logger.close()
    lines = path.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines if line != cut_off] == [1, 2]


def test_what_a_full_disk_refuses_is_written_later_without_a_gap(tmp_path: Path) -> None:
    logger = MetricLogger(tmp_path)
    disk, logger._lines = logger._lines, open("/dev/full", "ab", buffering=0)  # noqa: SIM115
    for step in (1, 2):
        logger.scalars(step, {"x": step})
    logger._lines.close()
    logger._lines = disk
    logger.scalars(3, {"x": 3})
    logger.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


def test_a_distribution_is_bounded_summarised_and_starts_anew() -> None:
    values = Distribution(capacity=101)
    for _ in range(2):
        values.add(range(100))
        values.add(100.0)
        values.add(np.ones(4))
        assert values.drain("x") == {"x/mean": 50.0, "x/p95": 95.0, "x/max": 100.0}
    assert values.drain("x") == {}


def test_means_are_over_the_rows_that_have_the_key() -> None:
    assert means([{"a": 1.0, "b": 2.0}, {"a": 3.0}]) == {"a": 2.0, "b": 2.0}


def test_a_log_line_names_its_process_and_is_made_once(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        get_logger("tester[3]").info("hello %d", 5)
    lines = capsys.readouterr().err.strip().splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == ["tester[3] INFO hello 5"] * 2
