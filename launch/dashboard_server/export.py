"""One HTML file of some runs: the dashboard's own pages with their data inside. It loads nothing from anywhere."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from launch.dashboard_server.api import answer, series
from launch.dashboard_server.recorded import image_file, opened, recorded_steps
from launch.dashboard_server.runs import Run, Runs, Unknown
from launch.dashboard_server.web import PAGES
from shared.recordings.reading import RecordingError
from shared.recordings.records import Summary

NUM_EPISODES = 10
_IMPORT = re.compile(r'(from\s+|import\s+)"\./([\w./-]+)"')


def export(runs: Runs, path: Path, episode_id: str = "") -> None:
    """Writes the report to `path`. ValueError where there is no such episode."""
    known = [runs.get(run.name) for run in runs.all()]
    chosen = [found(known, episode_id)] if episode_id else [each for run in known for each in some(run, len(known))]
    answers = {"runs": answer(runs, "runs", {})}
    images: dict[str, str] = {}
    for run in known:
        base = f"runs/{quote(run.name, safe='')}"
        for part in ("metrics", "steps"):
            answers[f"{base}/{part}"] = answer(runs, f"runs/{run.name}/{part}", {})
        names = [*run.metrics.steps.columns, *run.metrics.evaluations.columns]
        answers[f"{base}/series"] = series(run, names, limit=len(names))
        answers[f"{base}/health"] = answer(runs, f"runs/{run.name}/health", {}) | {"logs": []}
    for run, step, summary in chosen:
        base = f"runs/{quote(run.name, safe='')}/steps/{step}"
        answers[base] = answer(runs, f"runs/{run.name}/steps/{step}", {})
        try:
            page = answer(runs, f"runs/{run.name}/steps/{step}/{summary.id}", {})
        except RecordingError:
            continue  # the step's page names it
        answers[f"{base}/{'/'.join(quote(part, safe='') for part in summary.id.split('/'))}"] = page
        images |= pictures(run, page)
    start = f"#/episode/{quote(chosen[0][0].name, safe='')}/{chosen[0][1]}/{episode_id}" if episode_id else ""
    title = f"{', '.join(run.name for run in known)[:100]}"
    write(path, html({"answers": answers, "images": images, "title": title, "start": start}))


def some(run: Run, num_runs: int) -> list[tuple[Run, int, Summary]]:
    """Episodes of the newest recorded step: the worst ones first, and two in five that did best."""
    count = max(1, NUM_EPISODES // num_runs)
    for step in reversed(recorded_steps(run)):
        try:
            by_reward = sorted(opened(run, step).summaries, key=lambda summary: summary.reward)
        except (RecordingError, Unknown):
            continue
        best = by_reward[max(count - 2 * count // 5, len(by_reward) - 2 * count // 5) :]
        return [(run, step, each) for each in [*by_reward[: count - len(best)], *best]]
    return []


def found(runs: list[Run], episode_id: str) -> tuple[Run, int, Summary]:
    for run in runs:
        for step in reversed(recorded_steps(run)):
            try:
                summaries = opened(run, step).summaries
            except (RecordingError, Unknown):
                continue
            for summary in summaries:
                if summary.id == episode_id:
                    return run, step, summary
    raise ValueError(f"no recording of these runs has an episode {episode_id!r}; write it as TICKET/INDEX")


def pictures(run: Run, page: dict[str, Any]) -> dict[str, str]:
    """The images of an episode as data; those that cannot be shown are left out."""
    shown = {}
    for image in page["images"]:
        try:
            data, kind = image_file(run, image["file"])
        except (RecordingError, Unknown):
            continue
        shown[f"{run.name}/{image['file']}"] = data_uri(data, kind)
    return shown


def html(report: dict[str, Any]) -> str:
    modules = {
        f"pronk/{path.relative_to(PAGES)}": data_uri(
            _IMPORT.sub(r'\1"pronk/\2"', path.read_text(encoding="utf-8")).encode(), "text/javascript"
        )
        for path in sorted(PAGES.rglob("*.js"))
    }
    style = "\n".join((PAGES / name).read_text(encoding="utf-8") for name in ("uplot/uPlot.min.css", "style.css"))
    imports, start = msgspec.json.encode({"imports": modules}).decode(), 'import "pronk/app.js";'
    scripts = " ".join(digest(text) for text in (imports, start))
    policy = (
        f"default-src 'none'; script-src {scripts} data:; style-src {digest(style)}; img-src data:; base-uri 'none'"
    )
    data = msgspec.json.encode(report).decode().replace("<", "\\u003c")
    page = (PAGES / "index.html").read_text(encoding="utf-8")
    body = page[page.index("<body>") : page.index("</body>")]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Pronk</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><style>{style}</style>'
        f'<script type="importmap">{imports}</script></head>{body}'
        f'<script type="application/json" id="embedded">{data}</script>'
        f'<script type="module">{start}</script></body></html>\n'
    )


def digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def data_uri(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def write(path: Path, text: str) -> None:
    """The file appears when it is complete."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
