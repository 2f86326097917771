"""The tables of the live display, as pure functions of the run's state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from launch.processes.restarts import Supervised
from launch.terminal.run_state import RunState

BARS = "▁▂▃▄▅▆▇█"
NARROW = 76  # terminal width below which the numbers are in one column
MAX_TASKS = 8  # lines of tasks and held-out sets
LEVELS = {"warning": "yellow", "critical": "bold red"}


def run_table(run: RunState, width: int, now: float) -> RenderableType:
    """Return a run's table: progress, success, speed and alarms."""
    recipe = run.recipe
    if not run.rows:
        waited = now - run.started
        doing = run.phase or "starting"
        head = Text.assemble((recipe.run.name, "bold"), f"  {doing}, {duration(waited)} since the start")
        return Group(Rule(style="dim"), head)
    step, total = int(run.rows[-1]["step"]), recipe.learner.total_steps
    ago = now - run.step_at
    times = run.time_words + (f", {run.phase}" if run.phase else "")
    times += f", last step {duration(ago)} ago" if ago > max(10.0, 3 * run.mean("time/step_s")) else ""
    done = bar(step / total, 20 if width >= NARROW else 10)
    head = Text.assemble((recipe.run.name, "bold"), f"  step {step}/{total}  ", (done, "cyan"), f"  {times}")
    parts: list[RenderableType] = [Rule(style="dim"), head, numbers(cells(run, width), width)]
    if names := [*run.tasks, *(name for name in run.sets if name not in run.tasks)]:
        parts.append(task_table(run, names))
    return Group(*parts, *alarm_lines(run.alarms))


def task_table(run: RunState, names: Sequence[str]) -> Table:
    """Return a line for each task, and for each held-out set that no task has the name of."""
    table = Table.grid(padding=(0, 2))
    for style in ("dim", None, None, None, None):
        table.add_column(style=style, no_wrap=True)
    for name in names[:MAX_TASKS]:
        held_out = f"held out {run.sets[name]:.3f}" if name in run.sets else ""
        if name in run.tasks:
            success, reward = (run.mean(f"tasks/{name}/{key}") for key in ("success", "reward"))
            equal = f"equal rewards {100 * run.mean(f'tasks/{name}/without_variance'):.0f} %"
            table.add_row(name, f"success {success:.2f}", f"reward {reward:.2f}", held_out, equal)
        else:
            table.add_row(name, "", "", held_out, "")
    return table


def cells(run: RunState, width: int) -> list[tuple[str, str]]:
    mean, last = run.mean, run.last
    curve = 16 if width >= NARROW else 24
    cells = [
        ("success", f"{mean('rollout/success'):.2f} {sparkline(run.success, curve)}"),
        ("reward", f"{mean('rollout/reward'):.2f}"),
        ("turns", f"{mean('rollout/turns'):.1f}, {mean('speed/turns_per_s'):.0f} a second"),
        ("version", f"{last('policy_version') or 0:.0f}"),
        ("staleness", f"{mean('staleness/token/mean'):.1f} (max {run.staleness_max:.0f})"),
        ("learner idle", f"{100 * mean('learner/idle_frac'):.0f} %"),
        ("actors idle", f"{100 * mean('actors/idle_frac'):.0f} %"),
        ("entropy", f"{mean('policy/entropy'):.3g}"),
        ("gap", f"{mean('behaviour/logprob_gap'):.2g}"),
    ]
    if last("value/explained_variance") is not None:
        cells.append(("critic explains", f"{100 * mean('value/explained_variance'):.0f} %"))
    if run.evaluation:
        cells.append(("held out", run.evaluation))
    return cells


def numbers(cells: Sequence[tuple[str, str]], width: int) -> Table:
    """Return the cells as a table of names and values, in two columns, or in one if the terminal is narrow."""
    columns = 1 if width < NARROW else 2
    rows = -(-len(cells) // columns)
    table = Table.grid(padding=(0, 2))
    for column in range(columns):
        names = [name for name, _ in cells[column * rows : (column + 1) * rows]]
        table.add_column(style="dim", no_wrap=True, min_width=max(map(len, names), default=0))
        table.add_column(no_wrap=True, min_width=24 if columns > 1 else None)
    for row in range(rows):
        table.add_row(*(text for cell in cells[row::rows] for text in cell))
    return table


def alarm_lines(alarms: Mapping[str, Mapping[str, Any]]) -> Iterable[Text]:
    """Yield one line for each alarm, the critical ones first."""
    if not alarms:
        yield Text("no alarms", style="dim")
    for alarm in sorted(alarms.values(), key=lambda each: each.get("level") != "critical"):
        level = str(alarm.get("level"))
        yield Text.assemble(
            (f"{level} {alarm.get('rule')}", LEVELS.get(level, "")),
            f" since step {alarm.get('step')}: {alarm.get('message')}; {alarm.get('cure')}",
        )


def process_table(processes: Sequence[Supervised], now: float) -> RenderableType:
    """Return the table of a host's engines and actors: each with its state and its restarts within the last hour."""
    table = Table.grid(padding=(0, 2))
    for _ in range(4):
        table.add_column(no_wrap=True)
    for each in processes:
        state, style = ("done", "dim") if each.done else ("runs", "green") if each.child else ("starts again", "yellow")
        since = duration(now - each.restarts.started_at) if each.child and not each.done else ""
        restarts = f"{len(each.restarts)} restarts" if len(each.restarts) else ""
        table.add_row(each.name, Text(state, style), since, Text(restarts, "yellow"))
    return Group(Rule(style="dim"), table)


def bar(share: float, width: int) -> str:
    full = round(max(0.0, min(1.0, share)) * width)
    return "━" * full + "╌" * (width - full)


def sparkline(values: Iterable[float], width: int) -> str:
    """Return a sparkline of values from 0 to 1: the means of up to `width` equal parts."""
    heights = list(values)
    parts = min(width, len(heights))
    cuts = [round(i * len(heights) / parts) for i in range(parts + 1)] if parts else []
    means = [sum(heights[a:b]) / (b - a) for a, b in pairwise(cuts)]
    return "".join(BARS[min(len(BARS) - 1, int(max(0.0, mean) * len(BARS)))] for mean in means)


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"
