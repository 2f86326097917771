"""The tables of the page `figures/scale.md`, in Markdown."""

from __future__ import annotations

from tests.bench.scale.sweep import BOUNDS, COLOCATED, DESIGNS, ONE_STEP_OFF, OURS, SIGMAS, SLOWER, Row

NONE = "–"  # where no part of the GPUs fits


def best(rows: list[Row], system: str, gpus: int) -> Row | None:
    """The row of the best split of a system; None where none fits."""
    own = [row for row in rows if (row["kind"], row["system"], row["gpus"]) == ("systems", system, gpus)]
    return max(own, key=lambda row: row["episodes_per_s"], default=None)


def systems() -> list[str]:
    return [COLOCATED, ONE_STEP_OFF, *(OURS.format(bound) for bound in BOUNDS)]


def sizes_of(rows: list[Row]) -> list[int]:
    return sorted({row["gpus"] for row in rows if row["kind"] == "systems"})


def tables(rows: list[Row]) -> str:
    gpus = sizes_of(rows)
    lines = _head("episodes/s (times synchronous; mean staleness)", [f"{count} GPUs" for count in gpus])
    for system in systems():
        lines.append(_line(system, [_cell(best(rows, system, count), best(rows, COLOCATED, count)) for count in gpus]))
    for slower in SLOWER:
        head = f"publications that take {slower} times as long"
        lines += ["", *_head(head, [f"{count} GPUs" for count in gpus])]
        of = [row for row in rows if row["kind"] == "designs" and row["slower"] == slower]
        for design in DESIGNS:
            own = {row["gpus"]: row for row in of if row["design"] == design}
            lines.append(_line(design, [_speed(own.get(count)) for count in gpus]))
    if large := [row for row in rows if row["kind"] == "large"]:
        told = ", ".join(f"{row['design']} {_speed(row)}" for row in large)
        lines += ["", f"{large[0]['model']}, {large[0]['gpus']} GPUs, episodes/s: {told}"]
    return "\n".join([*lines, *tails(rows)])


def tails(rows: list[Row]) -> list[str]:
    of = [row for row in rows if row["kind"] == "tails"]
    if not of:
        return []
    lines = ["", *_head(f"episodes/s with {of[0]['gpus']} GPUs", [f"sigma {sigma}" for sigma in SIGMAS])]
    for system in dict.fromkeys(row["system"] for row in of):
        own = {row["sigma"]: row for row in of if row["system"] == system}
        lines.append(_line(system, [_speed(own.get(sigma)) for sigma in SIGMAS]))
    return lines


def _head(name: str, columns: list[str]) -> list[str]:
    return [_line(name, columns), "|---" * (len(columns) + 1) + "|"]


def _line(name: str, cells: list[str]) -> str:
    return f"| {name} | {' | '.join(cells)} |"


def _speed(row: Row | None) -> str:
    return f"{row['episodes_per_s']:.3g}" if row else NONE


def _cell(row: Row | None, base: Row | None) -> str:
    if row is None or base is None:
        return _speed(row)
    share = "" if row["share"] == 1 else f"; {row['share']:.0%}"
    times = row["episodes_per_s"] / base["episodes_per_s"]
    return f"{_speed(row)} (**{times:.2f}**; {abs(row['staleness']):.1f}{share})"
