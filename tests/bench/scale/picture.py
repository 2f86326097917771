"""The picture of the page `explanation/scale.md`."""

from __future__ import annotations

from pathlib import Path

from launch.plots.figure import COLOURS
from tests.bench.scale.sweep import COLOCATED, Row, best, sizes_of, systems


def draw(rows: list[Row], path: Path) -> None:
    """Throughput by number of GPUs, the same over the synchronous loop's, and staleness."""
    from matplotlib.figure import Figure

    gpus = sizes_of(rows)
    figure = Figure(figsize=(13.2, 4.0), layout="constrained")
    panels = figure.subplots(1, 3)
    for system, colour in zip(systems(), COLOURS, strict=True):
        found = [best(rows, system, count) for count in gpus]
        base = [best(rows, COLOCATED, count)["episodes_per_s"] for count in gpus]
        made = [row["episodes_per_s"] for row in found]
        panels[0].plot(gpus, made, "o-", color=colour, label=system)
        panels[1].plot(gpus, [one / other for one, other in zip(made, base, strict=True)], "o-", color=colour)
        panels[2].plot(gpus, [row["staleness"] for row in found], "o-", color=colour)
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
