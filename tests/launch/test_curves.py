"""Curves of runs: what is read from their folders, how several are put together, what the picture holds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from launch.curves import main
from launch.local import curve_of
from launch.plots.curve_data import Points, RunCurves, read_run, smoothed, spread
from launch.plots.figure import COLOURS, Curve, figure_of

METRICS = ("rollout/success", "rollout/reward", "policy/entropy", "behaviour/logprob_gap", "staleness/token/mean")


def step_row(step: int, *, minutes: float | None = None, **values: float | None) -> dict:
    row = dict.fromkeys(METRICS, 0.01 * step) | {"step": step, "time": 1e9 + step}
    return (
        row
        | {"progress/minutes": 0.5 * step if minutes is None else minutes, "progress/episodes": 64.0 * step}
        | values
    )


def write(folder: Path, rows: list[dict], tail: str = "") -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    return folder


def run_of(folder: Path, seed: int = 0, steps: int = 30) -> Path:
    rng = np.random.default_rng(seed)
    rows = [step_row(i, **{name: float(rng.uniform(0.2, 0.8)) for name in METRICS}) for i in range(1, steps + 1)]
    before = [{"step": 0, "eval/success": 0.1, "eval/reward": 0.2}, {"step": 0, "eval_greedy/success": 0.15}]
    return write(folder, [*before, *rows, {"step": steps, "eval/success": 0.9, "eval/reward": 0.8}])


def test_values_stand_at_their_step_minute_and_episode_and_missing_ones_are_left_out(tmp_path: Path) -> None:
    rows = [step_row(1), step_row(2, **{"policy/entropy": None}), step_row(4), {"step": 3, "eval/success": 0.5}]
    rows.insert(0, {"step": 0, "eval/success": 0.25})
    run = read_run(write(tmp_path / "run", rows, tail='{"step": 5, "rollout/rew'))
    entropy = run.series("policy/entropy", "minutes")
    assert (entropy.x.tolist(), entropy.y.tolist()) == ([0.5, 2.0], [0.01, 0.04])
    assert run.series("rollout/success", "episodes").x.tolist() == [64, 128, 256]
    evaluated = run.series("eval/success", "episodes")
    assert (evaluated.x.tolist(), evaluated.y.tolist()) == ([0.0, 192.0], [0.25, 0.5])


def test_after_a_restart_steps_made_again_count_once_and_time_goes_on() -> None:
    run = RunCurves("r")
    for step, minutes in ((1, 1.0), (2, 2.0), (3, 3.0), (2, 0.5), (3, 1.5), (4, 2.5)):
        run.add(step_row(step, minutes=minutes))
    found = run.series("rollout/success", "minutes")
    assert run.series("rollout/success", "steps").x.tolist() == [1, 2, 3, 4]
    assert found.x.tolist() == [1.0, 3.5, 4.5, 5.5]


def test_smoothing_is_a_mean_over_neighbours_and_of_fewer_at_the_ends() -> None:
    values = np.random.default_rng(0).normal(size=20)
    for window in (1, 4, 5, 50):
        got = smoothed(Points(np.arange(20.0), values), window).y
        before, after = (window - 1) // 2, window // 2
        assert got == pytest.approx([values[max(0, i - before) : i + after + 1].mean() for i in range(20)])


def test_runs_of_a_label_are_compared_where_all_of_them_are() -> None:
    grid, values = spread([Points(np.array([0.0, 10.0]), np.array([0.0, 1.0])),
                           Points(np.array([1.0, 5.0]), np.array([3.0, 3.0]))], points=5)  # fmt: skip
    assert grid.tolist() == [1, 2, 3, 4, 5]
    assert values == pytest.approx(np.array([[0.1, 0.2, 0.3, 0.4, 0.5], [3.0] * 5]))


def test_a_label_is_drawn_as_the_mean_of_its_runs_with_their_range(tmp_path: Path) -> None:
    runs = tuple(read_run(run_of(tmp_path / f"r{seed}", seed)) for seed in range(3))
    alone = read_run(run_of(tmp_path / "alone", 9))
    figure = figure_of([Curve("three", runs), Curve("alone", (alone,))], window=1, axis="episodes", title="a title")
    panels = [axes for axes in figure.axes if axes.get_title()]
    assert [axes.get_title() for axes in panels] == [
        "Success", "Reward", "Entropy of the policy", "Gap of policy and behaviour", "Staleness"
    ]  # fmt: skip
    assert all(axes.get_xlabel() == "episodes trained on" and axes.get_ylabel() for axes in panels)
    entropies = np.array([[row["policy/entropy"] for row in run.steps] for run in runs])
    mean, *_ = panels[2].get_lines()
    x, y = np.asarray(mean.get_xdata(), float), np.asarray(mean.get_ydata(), float)
    assert (mean.get_color(), x[0], x[-1]) == (COLOURS[0], 64, 64 * 30)
    assert y[0] == pytest.approx(entropies[:, 0].mean()) and y[-1] == pytest.approx(entropies[:, -1].mean())
    band = panels[2].collections[0].get_paths()[0].vertices
    assert [band[:, 1].min(), band[:, 1].max()] == pytest.approx([entropies.min(), entropies.max()], abs=0.05)
    (legend,) = [axes.get_legend() for axes in figure.axes if axes.get_legend()]
    assert [text.get_text() for text in legend.get_texts()] == [
        "three (3 runs)", "alone", "training episodes: each step, mean of runs", "lowest to highest run",
        "held-out samples, sampled", "held-out samples, greedy",
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ["curve.png", "curve.svg", "curve.pdf"])
def test_the_command_writes_a_picture_with_a_colour_for_each_run(tmp_path: Path, name: str, capsys) -> None:
    folders = [str(run_of(tmp_path / f"r{seed}", seed)) for seed in range(3)]
    out = tmp_path / name
    assert main([f"two={folders[0]},{folders[1]}", folders[2], "--out", str(out), "--x", "minutes"]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    if name.endswith(".png"):
        with Image.open(out) as image:
            seen = {colour for _, colour in image.convert("RGB").getcolors(2**24) or ()}
        assert {tuple(bytes.fromhex(colour[1:])) for colour in COLOURS[:2]} <= seen
    else:
        assert out.stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["{tmp}/none"], "none holds no metrics.jsonl; give a run's folder, such as runs/sokoban_tiny"),
        (["{tmp}/empty"], "metrics.jsonl has no step yet"),
        (["label="], "'label=' names no run; write LABEL=RUN,RUN,RUN"),
        (["{tmp}/r", "--metrics", "policy/entropi"], "a metric 'policy/entropi'; did you mean 'policy/entropy'?"),
        (["{tmp}/r", "--out", "{tmp}/curve.gif"], "give a name that ends in .png, .svg, .pdf"),
        (["{tmp}/r", "--out", "{tmp}/nowhere/curve.png"], "nowhere/curve.png"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(tmp_path: Path, arguments: list[str], expected: str, capsys) -> None:
    run_of(tmp_path / "r")
    write(tmp_path / "empty", [{"step": 1, "eval/success": 0.5}])
    assert main([argument.format(tmp=tmp_path) for argument in arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and expected in said


@pytest.mark.slow
def test_a_run_that_cannot_be_drawn_has_no_curve_and_one_line_says_why(tmp_path: Path, caplog) -> None:
    assert curve_of(tmp_path) is None
    (line,) = caplog.messages
    assert "\n" not in line and "no curve was drawn: ValueError" in line
    assert curve_of(run_of(tmp_path / "r")) == str(tmp_path / "r" / "curve.png")


def test_a_run_of_several_tasks_has_a_panel_for_each(tmp_path: Path) -> None:
    rows = [step_row(i, **{f"tasks/{name}/success": 0.1 * i for name in ("lake", "maze")}) for i in range(1, 9)]
    rows.append({"step": 8, "eval/success": 0.5, "eval/sets/lake/success": 0.75})
    run = read_run(write(tmp_path / "run", rows))
    figure = figure_of([Curve("run", (run,))])
    titles = [axes.get_title() for axes in figure.axes]
    assert [title for title in titles if title.startswith("Success: ")] == ["Success: lake", "Success: maze"]
    lake = figure.axes[titles.index("Success: lake")]
    marks = [line for line in lake.get_lines() if line.get_marker() == "o"]
    assert [list(line.get_ydata()) for line in marks] == [[0.75]]
