"""Draws curves: a panel for each metric, a colour for each label, and mean and range over a label's runs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from math import ceil
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from numpy.typing import ArrayLike

from launch.plots.curve_data import AXES, RunCurves, check_metric, smoothed, spread

FORMATS = (".png", ".svg", ".pdf")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito, 2008
Dash = Literal["-", "--", ":"]
DASHES: tuple[Dash, ...] = ("-", "--", ":")
STYLES = [(colour, dash) for dash in DASHES for colour in COLOURS]
HELD_OUT = {"eval": ("o", "held-out samples, sampled"), "eval_greedy": ("D", "held-out samples, greedy")}
LEGEND_LINE = 0.25  # inches
LOG_FROM = 30.0  # ratio of large to small values from which an axis is logarithmic


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel of the figure. `held_out`: name of the evaluations' metric whose values are marked in the panel,
    too."""

    metric: str
    title: str
    unit: str = ""
    held_out: str = ""
    share: bool = False  # values are between 0 and 1
    logarithmic: bool = False


PANELS = {
    "success": Panel("rollout/success", "Success", "share of episodes", "success", share=True),
    "reward": Panel("rollout/reward", "Reward", "mean of an episode", "reward"),
    "entropy": Panel("policy/entropy", "Entropy of the policy", "nats a token"),
    "gap": Panel(
        "behaviour/logprob_gap", "Gap of policy and behaviour", "mean |log ratio| of a token", logarithmic=True
    ),
    "staleness": Panel("staleness/token/mean", "Staleness", "policy versions, mean of tokens"),
}


@dataclass(frozen=True, slots=True)
class Curve:
    """The runs of one label, which differ only in their seed."""

    label: str
    runs: tuple[RunCurves, ...]


def draw(curves: Sequence[Curve], out: Path, **how: Any) -> None:
    """Write `figure_of(curves, **how)` to a file. Raise ValueError, in one line, as it does, and for a format that is
    not in FORMATS."""
    if out.suffix.lower() not in FORMATS:
        raise ValueError(f"--out {out}: give a name that ends in {', '.join(FORMATS)}")
    figure_of(curves, **how).savefig(out, dpi=130)


def figure_of(
    curves: Sequence[Curve], *, metrics: Sequence[str] = (), axis: str = "steps", window: int = 10, title: str = ""
) -> Figure:
    """Return a figure of curves. `metrics`: names of PANELS or of metrics; empty = all PANELS whose metric a run has.
    `axis`: one of AXES. `window`: number of steps that are averaged. Raise ValueError, in one line, for a metric that
    no run has."""
    runs = [run for curve in curves for run in curve.runs]
    panels = [PANELS.get(name) or Panel(name, name) for name in metrics]
    for panel in panels:
        check_metric(panel.metric, runs)
    panels = panels or [panel for panel in PANELS.values() if any(panel.metric in run.metrics for run in runs)]
    panels += [] if metrics else panels_of_tasks(runs)
    columns = 2 if len(panels) == 4 else min(len(panels), 3)
    rows = ceil(len(panels) / columns)
    below = LEGEND_LINE * (len(curves) + 4) / columns if len(panels) == rows * columns else 0.0
    figure = Figure(figsize=(4.4 * columns + 0.4, 3.2 * rows + 0.4 + below), layout="constrained")
    figure.suptitle(title, fontsize="x-large")
    places = list(figure.subplots(rows, columns, squeeze=False).flat)
    drawn = set[str]()
    for panel, axes in zip(panels, places, strict=False):
        for curve, style in zip(curves, cycle(STYLES), strict=False):
            drawn |= draw_curve(axes, panel, curve, style, axis, window)
        finish(axes, panel, AXES[axis])
    handles = legend(curves, drawn, window)
    for empty in places[len(panels) :]:
        empty.set_axis_off()
    if below:
        figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)
    else:
        places[len(panels)].legend(handles=handles, loc="center", frameon=False)
    return figure


def panels_of_tasks(runs: Sequence[RunCurves]) -> list[Panel]:
    """Return a panel of the success in each task, if a run has several."""
    found = (re.fullmatch(r"tasks/([^/]+)/success", name) for run in runs for name in sorted(run.metrics))
    names = dict.fromkeys(match[1] for match in found if match)
    unit = "share of episodes"
    return [Panel(f"tasks/{name}/success", f"Success: {name}", unit, f"sets/{name}/success", True) for name in names]


def draw_curve(axes: Axes, panel: Panel, curve: Curve, style: tuple[str, Dash], axis: str, window: int) -> set[str]:
    """Draw one label in one panel; return the kinds of elements drawn, for `legend`."""
    colour, dashes = style
    drawn = {"range"} if len(curve.runs) > 1 else set[str]()
    series = [s for s in (run.series(panel.metric, axis) for run in curve.runs) if len(s.y)]
    marked = panel.metric.startswith("eval")
    if series and not marked:
        smooth = [smoothed(s, window) for s in series]
        if len(series) == 1:
            axes.plot(series[0].x, series[0].y, dashes, color=colour, alpha=0.25, linewidth=0.8)
            axes.plot(smooth[0].x, smooth[0].y, dashes, color=colour, linewidth=1.8)
        else:
            grid, values = spread(smooth)
            axes.fill_between(grid, values.min(0), values.max(0), color=colour, alpha=0.2, linewidth=0)
            axes.plot(grid, values.mean(0), dashes, color=colour, linewidth=1.8)
            for s in smooth:  # beyond the range that all runs cover
                beyond = s.x >= grid[-1]
                axes.plot(s.x[beyond], s.y[beyond], dashes, color=colour, alpha=0.5, linewidth=0.8)
    for kind in HELD_OUT:
        metric = panel.metric if marked else f"{kind}/{panel.held_out}"
        if metric.partition("/")[0] != kind or not (marked or panel.held_out):
            continue
        for run_points in (run.series(metric, axis) for run in curve.runs):
            if len(run_points.y):
                drawn.add(kind)
                axes.add_line(points := marks(kind, colour, run_points.x, run_points.y))
                points.set_linestyle(dashes if marked else "none")
    return drawn | ({"line"} if series and not marked else set())


def finish(axes: Axes, panel: Panel, x_label: str) -> None:
    """Set a panel's labels, limits, scale and grid."""
    axes.autoscale_view()
    axes.set_xlim(left=0)
    axes.set(title=panel.title, xlabel=x_label, ylabel=panel.unit)
    if panel.share:
        axes.set_ylim(0, 1)
    lines = [np.asarray(line.get_ydata(), np.float64) for line in axes.get_lines()]
    values = np.concatenate([np.empty(0), *lines])
    if panel.logarithmic and values.size and values.min() > 0:
        low, high = np.quantile(values, (0.05, 0.95))
        axes.set_yscale("log" if high > LOG_FROM * low else "linear")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def marks(kind: str, colour: str, x: ArrayLike = (), y: ArrayLike = (), label: str = "") -> Line2D:
    """Return the marks of evaluations; those of greedy ones are hollow."""
    marker, face = HELD_OUT[kind][0], "white" if kind == "eval_greedy" else colour
    made = Line2D(x, y, linestyle="none", marker=marker, markersize=6, color=colour, markerfacecolor=face, label=label)
    made.set(zorder=3, clip_on=False)
    return made


def legend(curves: Sequence[Curve], drawn: set[str], window: int) -> list[Artist]:
    """Return the legend's entries for colours, lines, bands and marks."""
    handles: list[Artist] = []
    for curve, (colour, dashes) in zip(curves, cycle(STYLES), strict=False):
        label = curve.label if len(curve.runs) == 1 else f"{curve.label} ({len(curve.runs)} runs)"
        handles.append(Line2D([], [], color=colour, linestyle=dashes, linewidth=1.8, label=label))
    if "line" in drawn:
        what = "training episodes: " + ("each step" if window == 1 else f"mean of {window} steps")
        what += ", mean of runs" if "range" in drawn else ""
        handles.append(Line2D([], [], color="gray", linewidth=1.8, label=what))
    if "range" in drawn:
        handles.append(Patch(color="gray", alpha=0.2, label="lowest to highest run"))
    return [*handles, *(marks(kind, "gray", label=HELD_OUT[kind][1]) for kind in HELD_OUT if kind in drawn)]
