"""The picture of the page `figures/scale.md`."""

from __future__ import annotations

from pathlib import Path

from launch.plots.figure import COLOURS
from tests.bench.scale.sweep import COLOCATED, Row
from tests.bench.scale.tables import best, sizes_of, systems


def draw(rows: list[Row], path: Path) -> None:
    """Throughput by number of GPUs, the same over the synchronous loop's, and staleness."""
    from matplotlib.figure import Figure

    gpus = sizes_of(rows)
    figure = Figure(figsize=(13.2, 4.0), layout="constrained")
    panels = figure.subplots(1, 3)
    for system, colour in zip(systems(), COLOURS, strict=True):
        found = [(best(rows, system, count), best(rows, COLOCATED, count)) for count in gpus]
        fit = [(row, base) for row, base in found if row and base]
        places, made = [row["gpus"] for row, _ in fit], [row["episodes_per_s"] for row, _ in fit]
        times = [row["episodes_per_s"] / base["episodes_per_s"] for row, base in fit]
        for panel, values in zip(panels, (made, times, [row["staleness"] for row, _ in fit]), strict=True):
            panel.plot(places, values, "o-", color=colour, label=system if panel is panels[0] else None)
    panels[0].set(title="Throughput", ylabel="episodes a second", yscale="log")
    panels[1].set(title="Times a synchronous loop", ylim=(0, None))
    panels[2].set(title="Staleness", ylabel="policy versions, mean of tokens", ylim=(0, None))
    for panel in panels:
        panel.set_xscale("log", base=2)
        panel.set_xticks(gpus, [str(count) for count in gpus])
        panel.set_xlabel("GPUs, learner and engines together")
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=110)
