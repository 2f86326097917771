"""Every page of the dashboard in a real browser, over what a run of launch/local.py left: make test-watching."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from shared.recordings.reader import RecordedStep, read_step, steps
from tests.support.dashboard.browser import (
    MODES,
    address,
    all_images_are_there,
    browser,
    export_report,
    open_page,
    page,
    report,
    save_screenshot,
    sync_api,
)
from tests.support.runs import finished, local, metrics, places

__all__ = ["address", "browser", "page", "report"]  # fixtures
pytestmark = [pytest.mark.slow, pytest.mark.browser]
STEPS, GROUP = 10, 4  # the recipe's group


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run's folder; what the run said is in `said.log`."""
    runs = tmp_path_factory.mktemp("runs")
    fields = {"learner.total_steps": STEPS, "learner.checkpoint.every": 5, "eval.samples": 8}
    recorded = {"record.every": 5, "record.groups": 16}  # all, so that some win and some do not
    run = finished(local(places(runs, **fields, **recorded)))
    (runs / "said.log").write_text(run.stderr)
    return runs / "colour_tiny"


@pytest.fixture
def last(folder: Path) -> RecordedStep:
    *_, path = steps(folder / "recordings")
    return read_step(path)


def test_a_run_tells_once_with_which_command_to_look_at_it(folder: Path) -> None:
    told = re.findall(r"python launch/dashboard\.py.*", (folder.parent / "said.log").read_text())
    assert [shlex.split(line) for line in told] == [["python", "launch/dashboard.py", str(folder)]]


def test_every_page_shows_a_run_without_a_gap(page, address: str, folder: Path, last: RecordedStep) -> None:
    episode = f"{last.header.step}/{last.summaries[0].id}"
    for name, place, wait_for in (
        ("overview", "", ".chart canvas"),
        ("metrics", "#/metrics", ".metric canvas"),
        ("step", "#/step/colour_tiny", ".episode-row"),
        ("episode", f"#/episode/colour_tiny/{episode}", ".turn figure img"),
        ("health", "#/health/colour_tiny", ".card"),
    ):
        open_page(page, address, place, wait_for)
        save_screenshot(page, f"run_{name}")
        text = page.locator("main").inner_text()
        assert not re.search(r"NaN|undefined|\[object|cannot be shown|damaged", text), name
    open_page(page, address, "", ".chart canvas")
    assert page.get_by_text(f"{STEPS} / {STEPS} steps").is_visible() and page.get_by_text("finished").is_visible()
    assert page.locator(".chart canvas").count() == 6
    open_page(page, address, "#/metrics", ".metric canvas")
    names = page.locator(".metric h3").evaluate_all("all => all.map((name) => name.firstChild.textContent)")
    written = {name for row in metrics(folder.parent) for name in row} - {"step", "time"}
    assert {re.sub(r"/lag_\d+$", "", name) for name in written} == {re.sub(r"/lag_\d+$", "", name) for name in names}
    page.locator(".metric").last.scroll_into_view_if_needed()
    page.locator(".metric").last.locator("canvas").wait_for()


def test_the_health_page_ends_each_log_with_what_was_said_last(page, address: str, folder: Path) -> None:
    open_page(page, address, "#/health/colour_tiny", "pre.log")
    assert page.locator("[data-log]").evaluate_all("all => all.map((log) => log.dataset.log)") == [
        "actors.log",
        "learner.log",
    ]
    for name, words in (("actors", "the learner says stop"), ("learner", f"{STEPS} steps, ")):
        (line,) = [line for line in (folder / f"logs/{name}.log").read_text().splitlines() if words in line]
        box = page.locator(f"[data-log='{name}.log'] pre")
        assert line in box.inner_text()
        page.wait_for_function("e => e.scrollTop + e.clientHeight > e.scrollHeight - 8", arg=box.element_handle())
    said = [(folder / f"logs/{name}.log").read_text() for name in ("actors", "learner")]
    assert page.locator(".pill.warn").count() == sum(bool(re.search("ERROR|WARNING|Traceback", text)) for text in said)
    assert not any("tokenize" in text for text in said), "the start of a sound engine is not warned of"


def test_the_evaluations_of_a_run_are_recorded_with_all_that_they_reached(page, address: str, folder: Path) -> None:
    result = json.loads((folder / "result.json").read_text())
    for name, place in (("before", "0-before"), ("after", f"{STEPS}-after")):
        open_page(page, address, f"#/step/colour_tiny/{place}", f"h1:has-text('Evaluation {name} training')")
        sync_api.expect(page.locator("a.episode-row")).to_have_count(8)
        won = page.locator("a.episode-row").filter(has=page.get_by_text("success", exact=True)).count()
        assert won / 8 == pytest.approx(result[f"success_{name}"], abs=1e-3)
    save_screenshot(page, "run_evaluation")


def test_filters_leave_the_episodes_that_the_recording_says(page, address: str, last: RecordedStep) -> None:
    open_page(page, address, "#/step/colour_tiny", "a.episode-row")
    rows, known = page.locator("a.episode-row"), last.summaries
    sync_api.expect(rows).to_have_count(len(known))
    won = sum(summary.success > 0 for summary in known)
    assert 0 < won < len(known)
    for outcome, expected in (("success", won), ("failure", len(known) - won)):
        page.get_by_label("outcome").select_option(outcome)
        sync_api.expect(rows).to_have_count(expected)
    page.get_by_role("button", name="clear").click()
    for lag in {last.header.version - summary.oldest for summary in known}:
        page.get_by_label("lag").select_option(str(lag))
        expected = sum(last.header.version - summary.oldest == lag for summary in known)
        sync_api.expect(rows).to_have_count(expected)


def test_a_step_s_episodes_are_gone_through_and_coloured(page, address: str, last: RecordedStep) -> None:
    first = next(summary for summary in last.summaries if summary.trained)
    open_page(page, address, f"#/episode/colour_tiny/{last.header.step}/{first.id}", ".turn figure img")
    coloured = set()
    for mode in MODES:
        assert page.locator(".choice [aria-pressed=true]").inner_text() == mode
        tokens = page.locator(".answer .token")
        coloured.add(tuple(tokens.evaluate_all("all => all.map((token) => token.style.backgroundColor)")))
        page.keyboard.press("t")
    assert len(coloured) >= 5  # colours of single numbers may agree
    page.locator(".answer .token").first.hover()
    assert re.search(r"learner\s+−?\d.*engine\s+−?\d", page.locator("#tip").inner_text(), re.DOTALL)
    page.keyboard.press("g")
    sync_api.expect(page.locator("table.side thead th")).to_have_count(1 + GROUP)
    open_page(page, address, f"#/episode/colour_tiny/{last.header.step}/{last.summaries[0].id}", ".turn figure img")
    for summary in last.summaries:
        page.wait_for_selector(f".bar .code:text-is('{summary.id}')")
        assert all_images_are_there(page)
        answers = [turn.answer for turn in last.episode(summary).turns]
        shown = page.locator(".answer").evaluate_all("all => all.map((answer) => answer.textContent)")
        assert [text.replace("⏎", "") for text in shown] == answers
        page.keyboard.press("ArrowRight")


def test_an_episode_of_a_run_is_a_small_file(report, folder: Path, last: RecordedStep) -> None:
    path, page = report
    page.goto(export_report(folder, path, "--episode", last.summaries[0].id))
    page.wait_for_selector(".turn figure img")
    assert all_images_are_there(page) and path.stat().st_size < 150_000
