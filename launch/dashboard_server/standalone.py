"""Exports runs as one HTML file: the dashboard's pages with their data embedded. The file loads nothing else."""

from __future__ import annotations

import base64
import gzip
import hashlib
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from launch.dashboard_server.api import answer, series
from launch.dashboard_server.overview import overview
from launch.dashboard_server.recorded import image_file, listed, opened, recorded
from launch.dashboard_server.runs import Run, Runs, Unknown
from launch.dashboard_server.web import PAGES
from shared.recordings.episode_format import Summary
from shared.recordings.reader import RecordingError, RecordingId

NUM_EPISODES = 10
ALL_PAGES: tuple[str, ...] = ("overview", "metrics", "step", "episode", "health")
EPISODE_PAGES = ("step", "episode", "health")  # no curves, so no code that draws them
_IMPORT = re.compile(r'(from\s+|import\s+|import\()"\./([\w./-]+)"')


def export(runs: Runs, path: Path, episode_id: str = "") -> None:
    """Write the report to `path`. Raise ValueError if there is no such episode, or if the file cannot be written."""
    if not path.parent.is_dir():
        raise ValueError(f"--export {path}: {path.parent} is no folder; make it first")
    if path.is_dir():
        raise ValueError(f"--export {path}: it is a folder; name a file, such as {path / 'report.html'}")
    known = [runs.get(run.name) for run in runs.all()]
    if episode_id:
        chosen = [episode_of(known, episode_id)]
    else:
        chosen = [each for run in known for each in some(run, len(known))]
    pages, start = ALL_PAGES, ""
    if episode_id:
        ((run, place, _),) = chosen
        known, pages = [run], EPISODE_PAGES
        start = f"#/episode/{coded(run.name)}/{place}/{coded(episode_id, '/')}"
    answers, images = server_answers(runs, known, chosen, curves="metrics" in pages)
    title = f"{', '.join(run.name for run in known)[:100]}"
    write(path, html({"answers": answers, "images": images, "title": title, "start": start, "pages": pages}))


def coded(part: str, more: str = "") -> str:
    """Encode a text as encodeURIComponent does in the pages; characters in `more` stay unencoded, too."""
    return quote(part, safe="!'()*" + more)


def server_answers(
    runs: Runs, known: list[Run], chosen: list[tuple[Run, RecordingId, Summary]], *, curves: bool
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the server's answers about these episodes and their runs, by path, and the episodes' images."""
    places = {run.name: sorted({place for each, place, _ in chosen if each is run}) for run in known}
    answers: dict[str, Any] = {"runs": overview(known, places)}
    images: dict[str, str] = {}
    for run in known:
        base = f"runs/{coded(run.name)}"
        answers[f"{base}/steps"] = listed(places[run.name])
        answers[f"{base}/health"] = answer(runs, f"runs/{run.name}/health", {}) | {"logs": []}
        if curves:
            names = [*run.metrics.steps.columns, *run.metrics.evaluations.columns]
            answers[f"{base}/metrics"] = answer(runs, f"runs/{run.name}/metrics", {})
            answers[f"{base}/series"] = series(run, names, limit=len(names))
    for run, place, summary in chosen:
        base = f"runs/{coded(run.name)}/steps/{place}"
        answers[base] = answer(runs, f"runs/{run.name}/steps/{place}", {})
        try:
            page = answer(runs, f"runs/{run.name}/steps/{place}/{summary.id}", {})
        except RecordingError:
            continue  # the step's page reports it
        answers[f"{base}/{'/'.join(coded(part) for part in summary.id.split('/'))}"] = page
        images |= pictures(run, page)
    return answers, images


def some(run: Run, num_runs: int) -> list[tuple[Run, RecordingId, Summary]]:
    """Choose episodes of the newest recorded step, and as many of the newest recorded evaluation if there is one."""
    count, places = max(1, NUM_EPISODES // num_runs), list(reversed(recorded(run)))
    evaluations = [place for place in places if place.evaluation]
    if not evaluations:
        return extremes(run, places, count)
    of_steps = extremes(run, [place for place in places if not place.evaluation], count - count // 2)
    return of_steps + extremes(run, evaluations, count - len(of_steps))


def extremes(run: Run, places: list[RecordingId], count: int) -> list[tuple[Run, RecordingId, Summary]]:
    """Return `count` episodes of the first readable recording: those with the lowest rewards, then two fifths with the
    highest."""
    for place in places:
        try:
            by_reward = sorted(opened(run, place).summaries, key=lambda summary: summary.reward)
        except (RecordingError, Unknown):
            continue
        best = by_reward[max(count - 2 * count // 5, len(by_reward) - 2 * count // 5) :]
        return [(run, place, each) for each in [*by_reward[: count - len(best)], *best]]
    return []


def episode_of(runs: list[Run], episode_id: str) -> tuple[Run, RecordingId, Summary]:
    for run in runs:
        for place in reversed(recorded(run)):
            try:
                summaries = opened(run, place).summaries
            except (RecordingError, Unknown):
                continue
            for summary in summaries:
                if summary.id == episode_id:
                    return run, place, summary
    raise ValueError(f"no recording of these runs has an episode {episode_id!r}; write it as TICKET/INDEX")


def pictures(run: Run, page: dict[str, Any]) -> dict[str, str]:
    """Return the images of an episode as data URIs; those that cannot be shown are left out."""
    shown = {}
    for image in page["images"]:
        try:
            data, kind = image_file(run, image["file"])
        except (RecordingError, Unknown):
            continue
        shown[f"{run.name}/{image['file']}"] = data_uri(data, kind)
    return shown


def modules(pages: tuple[str, ...]) -> dict[str, str]:
    """Return the scripts that these pages need, by name, with imports renamed for an import map."""
    texts, waiting = {}, ["app.js"]
    while waiting:
        name = waiting.pop()
        if name in texts:
            continue
        texts[name] = (PAGES / name).read_text(encoding="utf-8")
        for how, target in _IMPORT.findall(texts[name]):
            if not how.endswith("(") or Path(target).stem in pages:  # a page is imported when it is first shown
                waiting.append(target)
    return {f"pronk/{name}": _IMPORT.sub(r'\1"pronk/\2"', text) for name, text in sorted(texts.items())}


def html(report: dict[str, Any]) -> str:
    scripts = modules(report["pages"])
    sheets = ("uplot/uPlot.min.css", "style.css") if "pronk/uplot/uPlot.esm.js" in scripts else ("style.css",)
    style = "\n".join((PAGES / name).read_text(encoding="utf-8") for name in sheets)
    uris = {name: data_uri(text.encode(), "text/javascript") for name, text in scripts.items()}
    imports, start = msgspec.json.encode({"imports": uris}).decode(), 'import "pronk/app.js";'
    hashes = " ".join(digest(text) for text in (imports, start))
    policy = f"default-src 'none'; script-src {hashes} data:; style-src {digest(style)}; img-src data:; base-uri 'none'"
    data = base64.b64encode(gzip.compress(msgspec.json.encode(report), mtime=0)).decode()
    page = (PAGES / "index.html").read_text(encoding="utf-8")
    body = page[page.index("<body>") : page.index("</body>")]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Pronk</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><style>{style}</style>'
        f'<script type="importmap">{imports}</script></head>{body}'
        f'<script type="application/gzip" id="embedded">{data}</script>'
        f'<script type="module">{start}</script></body></html>\n'
    )


def digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def data_uri(data: bytes, kind: str) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def write(path: Path, text: str) -> None:
    """Write the file; it appears under its name only when it is complete. Raise ValueError if it cannot be written,
    leaving nothing behind."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise ValueError(f"--export {path} cannot be written: {error.strerror}") from None
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
