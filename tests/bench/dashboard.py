"""The dashboard over a long run: seconds to its first paint, and memory of its server while every page is looked at.

    python tests/bench/dashboard.py [--episodes 15000] [--gb 2] [--folder FOLDER]

It makes the run's folder (recordings by the writer that a learner uses, of boards whose images are drawn anew) and
removes it afterwards. The last line is one JSON object.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import argparse
import json
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import xxhash

from shared.recordings.episode_format import StepHeader, StepImages
from shared.recordings.reader import FOLDER, IMAGES, RecordedStep, read_step
from shared.recordings.writer import StepWriter
from tests.support.dashboard.recorded_run import make_run

A_STEP = 64  # episodes
PAGES = ("", "#/metrics", "#/health/long", "#/step/long/{step}", "#/episode/long/{step}/{id}")
PAINTED = {"": ".chart canvas", "#/m": ".metric canvas", "#/h": ".card", "#/s": ".episode-row", "#/e": ".turn img"}


def main(argv: list[str] | None = None) -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--episodes", type=int, default=15_000)
    made.add_argument("--gb", type=float, default=2.0)
    made.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = made.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="pronk-dashboard-", dir=options.folder))
    try:
        result = {"episodes": options.episodes, **fill(folder / "long", options.episodes, options.gb)}
        with served(folder) as (address, process):
            result |= looked_at(address, process, read_step(newest(folder / "long")))
    finally:
        shutil.rmtree(folder)
    print(json.dumps(result))
    return 0


def fill(run: Path, num_episodes: int, gb: float) -> dict[str, float]:
    """A recording of each step and images of random pixels, until all takes so many GB."""
    num_steps = -(-num_episodes // A_STEP)
    make_run(run, steps=num_steps, recorded=(1,), groups=4)
    first = read_step(run / FOLDER / "step_00000001.rec")
    episodes = [first.episode(summary) for summary in first.summaries]
    for step in range(2, num_steps + 1):
        writer = StepWriter(run / FOLDER, StepHeader(step=step, version=step, time=1.8e9 + 30 * step), StepImages())
        for i in range(min(A_STEP, num_episodes - A_STEP * (step - 1))):
            changed = {"ticket_id": f"{step}-{i // 4}", "index": i % 4, "started": 1.8e9 + i}
            writer.add(msgspec.structs.replace(episodes[i % len(episodes)], **changed))
        writer.close()
    size, rng, number = bytes_of(run), np.random.default_rng(0), 0
    while size < gb * 1e9:
        data = rng.bytes(1 << 20)
        (run / FOLDER / IMAGES / f"{xxhash.xxh3_128_hexdigest(data)}.bin").write_bytes(data)
        size, number = size + len(data), number + 1
    return {"steps": num_steps, "gb": round(size / 1e9, 2)}


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def newest(run: Path) -> Path:
    return sorted((run / FOLDER).glob("*.rec"))[-1]


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [sys.executable, "launch/dashboard.py", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found, "the dashboard did not start"
            yield found[0], process
        finally:
            process.terminate()


def looked_at(address: str, process: subprocess.Popen[str], last: RecordedStep) -> dict[str, Any]:
    """The first look is the server's first; then each page a few times, and every fifth recorded step."""
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium") or shutil.which("google-chrome")
    assert path, "no Chromium is installed: apt-get install chromium"
    seconds: dict[str, float] = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 900})
        for place in PAGES:
            name = place.split("/")[1] if "/" in place else "overview"
            page.goto("about:blank")
            begun = time.monotonic()
            page.goto(address + place.format(step=last.header.step, id=last.summaries[0].id))
            page.wait_for_selector(PAINTED[place[:3]])
            seconds[name] = round(time.monotonic() - begun, 2)
            paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime / 1000")
            seconds[f"{name}_first_paint"] = round(paint, 2)
        for step in range(1, last.header.step, 5):
            assert page.request.get(f"{address}api/runs/long/steps/{step}").ok
        browser.close()
    status = Path(f"/proc/{process.pid}/status").read_text()
    peak = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert peak
    return {"seconds": seconds, "server_peak_mb": round(int(peak[1]) / 1024, 1)}


if __name__ == "__main__":
    sys.exit(main())
