"""What is written can be read back by TensorBoard, and aggregates are what they say."""

from __future__ import annotations

import io
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as PILImage
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from learner.metrics.metric_writer import MetricLogger
from shared.log import get_logger
from shared.metrics import Distribution, means
from tests.support.machine import until


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
    monkeypatch.setattr("learner.metrics.metric_writer.RETRY_S", 0.0)
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


FOLDER_GONE = """
import pathlib, shutil, sys, time
from learner.metrics.metric_writer import MetricLogger
logger = MetricLogger(pathlib.Path(sys.argv[1]))
logger.scalars(1, {"reward": 1.0})
logger.flush()
shutil.rmtree(sys.argv[1])
logger.scalars(2, {"reward": 1.0})
logger.flush()
logger.scalars(3, {"reward": 1.0})
"""


@pytest.mark.slow
def test_a_folder_that_is_gone_is_told_in_a_line_and_no_traceback_of_a_thread(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FOLDER_GONE, str(tmp_path / "run")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert "TensorBoard lacks the values around step" in ended.stderr and "Traceback" not in ended.stderr


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
    path = tmp_path / "metrics.jsonl"
    logger = MetricLogger(tmp_path, tensorboard=False)
    logger.scalars(0, {f"a long name of a metric, to fill the file: {number}": 0.0 for number in range(10_000)})
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, usual[1]))  # half of a row fits
    try:
        for step in (1, 2):
            logger.scalars(step, {"x": step})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert path.read_bytes()[-1:] != b"\n"
    logger.scalars(3, {"x": 3})
    logger.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1, 2, 3]


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
    assert [line.split(" ", 2)[2] for line in lines] == ["tester[3] INFO hello 5"] * 2


def test_a_run_that_goes_back_writes_each_step_once(tmp_path: Path) -> None:
    logger = MetricLogger(tmp_path)
    for step in range(1, 7):
        logger.scalars(step, {"rollout/reward": float(step)})
        if step == 4:
            logger.scalars(2, {"eval/success": 0.5})  # of an evaluation that took two steps
    logger.close()
    second = int(time.time())
    until(lambda: int(time.time()) > second, 5)  # TensorBoard orders files of one process by their names, .10 before .9
    logger = MetricLogger(tmp_path, steps_done=2)
    for step in range(3, 5):
        logger.scalars(step, {"rollout/reward": 10.0 * step})
    logger.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row.get("rollout/reward")) for row in rows] == [(1, 1), (2, 2), (2, None), (3, 30), (4, 40)]
    undone = (tmp_path / "metrics.undone.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in undone] == [3, 4, 5, 6]
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("rollout/reward")] == [(1, 1), (2, 2), (3, 30), (4, 40)]


def test_a_run_that_goes_on_where_it_was_keeps_its_file(tmp_path: Path) -> None:
    logger = MetricLogger(tmp_path)
    logger.scalars(1, {"rollout/reward": 1.0})
    logger.close()
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b"cut o")
    before = (tmp_path / "metrics.jsonl").stat().st_ino
    MetricLogger(tmp_path, steps_done=1).close()
    assert (tmp_path / "metrics.jsonl").stat().st_ino == before and not (tmp_path / "metrics.undone.jsonl").exists()
