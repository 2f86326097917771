"""Every page of the dashboard in a real browser, over recordings of real boards: make test-watching."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.run_status import StatusFile
from tests.support.dashboard.browser import (
    MODES,
    address,
    all_images_are_there,
    browser,
    dashboard,
    export_report,
    open_page,
    page,
    report,
    save_screenshot,
    sync_api,
    watched,
)
from tests.support.dashboard.recorded_run import make_run, make_trace

__all__ = ["address", "browser", "page", "report"]  # fixtures
pytestmark = [pytest.mark.slow, pytest.mark.browser]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, one of them with damage."""
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "sokoban", evaluated=(20,))
    make_trace(folder / "sokoban")
    make_trace(folder / "sokoban", (1, 2))
    make_run(folder / "other", steps=30, recorded=())
    with (folder / "other/metrics.jsonl").open("a") as lines:
        lines.write("damaged\n")
    return folder


def test_the_overview_compares_runs_and_leads_to_what_an_alarm_is_about(page, address: str) -> None:
    open_page(page, address, "", ".chart canvas")
    assert page.locator("table.runs tbody tr").count() == 2
    assert page.get_by_text("1 damaged line").is_visible()
    assert page.locator("canvas").count() == 6
    save_screenshot(page, "overview")
    page.get_by_role("button", name="episodes").click()
    page.wait_for_url("**x=progress*")
    page.get_by_label("curves of other").uncheck()
    page.locator(".alarm summary").first.click()
    page.locator(".alarm a.chip").first.click()
    page.wait_for_selector(".verdict.bad")
    assert "20/20-0/1" in page.url


def test_a_page_follows_a_run_that_goes_on(page, address: str, folder: Path) -> None:
    open_page(page, address, "", ".chart canvas")
    with (folder / "other/metrics.jsonl").open("a") as lines:
        lines.write('{"step": 31, "time": 1.0, "rollout/reward": 0.5, "rollout/success": 0.5}\n')
    sync_api.expect(page.get_by_text("31 / 30 steps")).to_be_visible(timeout=20_000)
    sync_api.expect(page.locator("table.runs .pill.good")).to_have_text(["running", "running"])


def test_charts_that_have_left_the_page_are_given_up(page, address: str) -> None:
    open_page(page, address, "", ".chart canvas")
    for name in ("episodes", "minutes", "step"):
        page.wait_for_timeout(5_500)
        page.get_by_role("button", name=name, exact=True).click()
        page.wait_for_url(f"**x=*{name}*")
        page.wait_for_selector(".chart canvas")
    drawn = page.evaluate("import(new URL('pages/charts.js', document.baseURI).href).then((m) => m.drawn.size)")
    assert 6 <= drawn <= 12 and page.locator("canvas").count() == 6


def test_metrics_are_found_by_a_word_and_split_by_lag(page, address: str) -> None:
    open_page(page, address, "#/metrics", ".metric canvas")
    page.get_by_label("search").fill("entropy of the policy")
    sync_api.expect(page.locator(".metric")).to_have_count(1)
    page.get_by_role("button", name="by lag").click()
    page.get_by_text("lag 1").first.wait_for()
    assert "healthy" in page.locator(".metric").inner_text()
    page.get_by_label("mean of").select_option("20")
    save_screenshot(page, "metrics")


def test_a_step_is_filtered_by_outcome_ending_and_reward(page, address: str) -> None:
    open_page(page, address, "#/step/sokoban/20", ".episode-row")
    rows = page.locator(".episode-row")
    assert rows.count() == 16
    save_screenshot(page, "step")
    page.get_by_label("outcome").select_option("failure")
    failed = rows.count()
    assert 0 < failed < 16 and rows.filter(has_text="no success").count() + rows.filter(has_text="not trained").count()
    page.get_by_label("ending").select_option("env_error")
    assert rows.count() == 1
    page.get_by_role("button", name="clear").click()
    sync_api.expect(rows).to_have_count(16)
    page.locator(".bins button").last.click()
    assert 0 < rows.count() < 16
    rows.first.click()
    page.wait_for_selector(".verdict.good")
    assert "1 of" in page.locator("main").inner_text()


def test_an_episode_is_stepped_through_by_keys_and_its_tokens_are_coloured_by_choice(page, address: str) -> None:
    open_page(page, address, "#/episode/sokoban/20/20-0/1", ".turn figure img")
    assert page.locator(".verdict h2").inner_text().startswith("No success: it ran out of turns")
    assert all_images_are_there(page)
    save_screenshot(page, "episode")
    seen = set()
    for mode in MODES:
        assert page.locator(".choice [aria-pressed=true]").inner_text() == mode
        tokens = page.locator(".answer .token")
        seen.add(tuple(tokens.evaluate_all("all => all.map((token) => token.style.backgroundColor)")))
        page.keyboard.press("t")
    assert len(seen) == len(MODES)
    page.locator(".answer .token").nth(2).hover()
    assert "learner" in page.locator("#tip").inner_text() and "engine" in page.locator("#tip").inner_text()
    page.keyboard.press("j")
    page.keyboard.press("j")
    assert page.locator(".turn.selected h3").inner_text().startswith("Turn 2")
    assert "turn=2" in page.url
    page.keyboard.press("r")
    assert "<|vision_start|>" in page.locator(".stream").first.inner_text()
    for key, place in (
        ("ArrowRight", "20-0/2"),
        ("ArrowLeft", "20-0/1"),
        ("ArrowDown", "20-0/2"),
        ("ArrowUp", "20-0/1"),
    ):
        page.keyboard.press(key)
        page.wait_for_selector(f".bar .code:has-text('{place}')")
    page.keyboard.press("g")
    page.wait_for_selector("table.side")
    assert page.locator("table.side thead th").count() == 5


def times(page) -> dict[str, int]:  # type: ignore[no-untyped-def]
    """How often each span is in sight, by the table below the timeline."""
    rows = page.locator("table.totals tbody tr")
    return {row.get_attribute("data-name"): int(row.locator("td").nth(1).inner_text()) for row in rows.all()}


def test_a_trace_is_moved_in_and_measured(page, address: str) -> None:
    open_page(page, address, "#/traces/sokoban", "table.totals tbody tr")
    assert "steps 10 to 12" in page.locator("h1").inner_text()
    assert "2 spans lost" in page.locator("main").inner_text()
    assert times(page) == {
        "step": 3, "forward": 3, "backward": 3, "wait for groups": 3,
        "group": 1, "episode": 12, "turn": 12, "decode": 12,
    }  # fmt: skip
    save_screenshot(page, "traces")
    place = page.locator("canvas.timeline").bounding_box()
    middle = (place["x"] + 0.9 * place["width"], place["y"] + 22 + 20 + 4)  # the last step, on the first thread
    page.mouse.move(*middle)
    assert page.locator("#tip").inner_text().splitlines()[0] == "step"
    page.mouse.down()
    page.mouse.up()
    assert page.locator(".measured").inner_text() == "step: 700 ms, from 3.2 s on; 12 7-a"
    for _ in range(8):
        page.mouse.wheel(0, -100)
    sync_api.expect(page.locator("tr[data-name=episode]")).to_have_count(0)
    assert "step" in times(page)
    page.keyboard.press("0")
    sync_api.expect(page.locator("tr[data-name=episode]")).to_have_count(1)
    height = place["height"]
    page.get_by_role("button", name="all 13 threads").click()
    assert page.locator("canvas.timeline").bounding_box()["height"] > height
    page.get_by_role("button", name="decode").click()
    assert page.locator("tr.selected").get_attribute("data-name") == "decode"
    page.get_by_label("trace").select_option("steps_00000001_00000002")
    sync_api.expect(page.locator("h1")).to_contain_text("steps 1 to 2")


def test_a_run_without_traces_says_how_to_make_one(page, address: str) -> None:
    open_page(page, address, "#/traces/other", "h1")
    sync_api.expect(page.locator("main")).to_contain_text('--trace.steps "[10, 12]"')
    page.get_by_label("run").select_option("sokoban")
    page.wait_for_selector("table.totals tbody tr")
    page.keyboard.press("h")
    page.wait_for_url("**/health/sokoban")
    page.keyboard.press("x")
    page.wait_for_url("**/traces/sokoban")


def test_a_turn_that_begins_a_segment_shows_its_own_picture_and_what_is_seen_again(page, address: str) -> None:
    open_page(page, address, "#/episode/sokoban/20/20-2/0", ".turn figure img")
    turns = page.locator(".turn")
    assert turns.nth(1).locator(".again").count() == 0 and "segment" not in turns.nth(1).inner_text()
    assert turns.nth(2).locator("figure").count() == 1 and turns.nth(2).locator(".again img").count() == 1
    shown = [turns.nth(number).locator("figure img").get_attribute("src") for number in (1, 2)]
    assert turns.nth(2).locator(".again img").get_attribute("src") == shown[0] != shown[1]
    assert "segment 2: what the model reads, from the prompt on" in turns.nth(2).inner_text()
    assert page.locator(".strip button").nth(2).locator("img").count() == 1
    save_screenshot(page, "segments")


def test_a_turn_has_an_address_of_its_own(page, address: str) -> None:
    open_page(page, address, "#/episode/sokoban/20/20-0/1?turn=4&colour=entropy", ".turn.selected")
    assert page.locator(".turn.selected h3").inner_text().startswith("Turn 4")
    assert page.locator(".choice [aria-pressed=true]").inner_text() == "entropy"
    sync_api.expect(page.locator(".turn.selected")).to_be_in_viewport()


def test_an_evaluation_s_failures_are_led_to_and_say_why(page, address: str) -> None:
    open_page(page, address, "", ".chart canvas")
    page.get_by_role("link", name="1 evaluation").click()
    page.wait_for_selector("h1:has-text('Evaluation after step 20')")
    save_screenshot(page, "evaluation")
    said = page.locator("main").inner_text()
    assert "16 of its 32 episodes are recorded" in said and "75 %" in said and "variance" not in said
    page.get_by_label("outcome").select_option("failure")
    page.locator("a.episode-row").first.click()
    page.wait_for_selector(".verdict.bad")
    assert "20-step_20/step_20/20-" in page.url and all_images_are_there(page)
    for mode in ("logprob", "version", "mask"):
        assert page.locator(".choice [aria-pressed=true]").inner_text() == mode
        page.keyboard.press("t")
    place = page.locator(".bar .code").first.inner_text()
    page.keyboard.press("ArrowRight")
    page.wait_for_function("place => document.querySelector('.bar .code').innerText !== place", arg=place)
    page.locator(".bar a").first.click()
    page.wait_for_selector("a.episode-row")
    page.get_by_label("recording").select_option("10")
    page.wait_for_selector("h1:has-text('Step 10')")


def test_no_text_of_a_recording_or_a_log_is_markup(page, address: str) -> None:
    open_page(page, address, "#/episode/sokoban/20/20-1/0", ".verdict pre.error")
    assert "<script>" in page.locator(".verdict pre.error").inner_text()
    open_page(page, address, "#/health/sokoban", "pre.log")
    assert "<img src=x" in page.locator("pre.log").first.inner_text()
    save_screenshot(page, "health")
    assert "owned" not in page.title() and page.locator("main script, main img").count() == 0


def test_dark_and_light_keys_and_a_wrong_address(page, address: str) -> None:
    open_page(page, address, "#/step/sokoban/10", ".episode-row")
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.keyboard.press("d")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    page.keyboard.press("?")
    assert page.locator("dialog kbd").count() > 8
    page.keyboard.press("Escape")
    page.keyboard.press("m")
    page.wait_for_selector(".metric")
    open_page(page, address, "#/nothing", "h1:has-text('This cannot be shown')")


def test_a_report_opens_from_a_file_without_any_server(report, folder: Path) -> None:  # type: ignore[no-untyped-def]
    path, page = report
    address = export_report(folder, path)
    page.goto(address)
    page.wait_for_selector(".chart canvas")
    page.keyboard.press("m")
    page.wait_for_selector(".metric canvas")
    page.goto(f"{address}#/step/sokoban/20")
    page.wait_for_selector("a.episode-row")
    page.locator("a.episode-row").last.click()
    page.wait_for_selector(".turn figure img")
    assert all_images_are_there(page)
    page.keyboard.press("h")
    page.get_by_text("A report holds no logs.").wait_for()


def test_a_report_of_one_episode_shows_it_whole_and_leads_nowhere_else(report, folder: Path) -> None:  # type: ignore[no-untyped-def]
    path, page = report
    page.goto(export_report(folder, path, "--episode", "20-0/1"))
    page.wait_for_selector(".turn figure img")
    assert page.locator(".verdict h2").inner_text().startswith("No success: it ran out of turns")
    assert all_images_are_there(page) and page.locator(".turn").count() == 6
    for mode in MODES:
        assert page.locator(".choice [aria-pressed=true]").inner_text() == mode
        page.keyboard.press("t")
    for key in ("ArrowRight", "ArrowLeft", "ArrowDown", "ArrowUp", "o", "m"):
        page.keyboard.press(key)
    assert page.locator(".bar .code").first.inner_text() == "20-0/1"
    assert page.locator("nav a").all_inner_texts() == ["Step", "Episode", "Health"]
    page.keyboard.press("g")
    page.wait_for_selector("table.side")
    page.keyboard.press("s")
    page.wait_for_selector("a.episode-row")
    assert page.locator(".episode-row").count() == 16 and page.locator("a.episode-row").count() == 1
    page.keyboard.press("h")
    page.get_by_text("A report holds no logs.").wait_for()
    links = page.locator("a").evaluate_all("all => all.map((link) => link.getAttribute('href'))")
    assert not [link for link in links if "metrics" in link or link == "#/"]
    page.locator("a.brand").click()
    page.wait_for_selector(".turn figure img")


@pytest.fixture
def many(browser, tmp_path: Path) -> Iterator[object]:  # type: ignore[no-untyped-def]
    """A page over many runs, with one that failed before its first step."""
    runs = tmp_path / "many"
    runs.mkdir()
    for number in range(12):
        make_run(runs / f"run_{number}", steps=3, recorded=())
        os.utime(runs / f"run_{number}/metrics.jsonl", (1000 + number, 1000 + number))
    make_run(runs / "run_0.1", steps=3, recorded=())
    (runs / "failed").mkdir()
    (runs / "failed/recipe.json").write_text("{}")
    status = StatusFile(runs / "failed")
    status.enter("loading the model")
    status.end("failed", "40 of the last 40 episodes failed")
    (runs / "empty").mkdir()
    (runs / "empty/recipe.json").write_text("{}")
    StatusFile(runs / "empty").end("stopped", "asked to")
    with dashboard(runs) as address, watched(browser, address) as page:
        page.goto(address)
        page.wait_for_selector("table.runs")
        yield page


def test_of_many_runs_the_newest_are_drawn_and_the_others_are_found(many) -> None:  # type: ignore[no-untyped-def]
    rows = many.locator("table.runs tbody tr")
    sync_api.expect(rows).to_have_count(13)
    assert rows.locator("input:checked").count() == 6
    colours = rows.locator("input").evaluate_all("all => all.map((box) => box.style.accentColor)")
    assert len(set(colours)) == len(colours)
    many.get_by_label("with 2 runs moved aside or empty").check()
    sync_api.expect(rows).to_have_count(15)
    many.get_by_label("runs", exact=True).fill("run_1")
    sync_api.expect(rows).to_have_count(3)
    many.goto(many.url.split("#")[0] + "#/metrics")
    many.wait_for_selector(".metric canvas")
    assert many.locator(".run-boxes input:checked").count() == 6
    assert many.locator(".metric .u-legend:visible").count() == 0, "there is one legend, that of the page"
    many.set_viewport_size({"width": 400, "height": 900})
    for place in ("#/metrics", "#/", "#/health/run_1"):
        many.goto(many.url.split("#")[0] + place)
        many.wait_for_timeout(300)
        assert many.evaluate("document.documentElement.scrollWidth") <= 400


def test_a_run_that_failed_before_its_first_step_looks_so(many) -> None:  # type: ignore[no-untyped-def]
    row = many.locator("table.runs tbody tr").filter(has_text="failed").first
    assert row.locator(".pill.bad").inner_text() == "failed"
    assert "40 of the last 40 episodes failed" in row.inner_text()
    row.locator("a").first.click()
    many.get_by_text("not known yet").first.wait_for()  # the page of all runs has cards too
    text = many.locator("main").inner_text()
    assert "failed: 40 of the last 40 episodes failed" in text and text.count("not known yet") == 2
    assert many.locator(".card .good-text").count() == 0
