"""The dashboard in the system's Chromium: fixtures for its server over a test module's `folder`, and for pages that are
checked for errors."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="pip install --group watch")
SCREENSHOTS = Path("build/screenshots")
MODES = ["advantage", "logprob", "gap of engine and learner", "ratio", "entropy", "version", "mask"]


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    """Yield the address of a dashboard over the test module's `folder` fixture."""
    with dashboard(folder) as address:
        yield address


@contextmanager
def dashboard(folder: Path) -> Iterator[str]:
    """Yield the address of a dashboard over a folder."""
    command = [sys.executable, "launch/dashboard.py", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        found = re.search(r"http://\S+", server.stdout.readline())
        try:
            assert found, "the dashboard did not start"
            yield found[0]
        finally:
            server.terminate()
            assert server.wait(20) == 0


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert path, "no Chromium is installed: apt-get install chromium"
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def watched(browser, address: str) -> Iterator[object]:  # type: ignore[no-untyped-def]
    """Yield a page; fail if it reports an error or warning, or requests anything outside of the address."""
    page = browser.new_page(viewport={"width": 1400, "height": 900})
    wrong: list[str] = []
    page.on("console", lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda asked: wrong.append(asked.url) if not asked.url.startswith((address, "data:")) else None)
    yield page
    page.close()
    assert wrong == []


@pytest.fixture
def page(browser, address: str) -> Iterator[object]:  # type: ignore[no-untyped-def]
    """Yield a page that fails the test if it reports an error or warning, or requests anything from elsewhere."""
    with watched(browser, address) as page:
        yield page


def open_page(page, address: str, place: str, wait_for: str) -> None:  # type: ignore[no-untyped-def]
    page.goto(f"{address}{place}")
    page.wait_for_selector(wait_for)


def all_images_are_there(page) -> bool:  # type: ignore[no-untyped-def]
    page.wait_for_load_state("networkidle")
    return page.evaluate("document.images.length > 0 && [...document.images].every((image) => image.naturalWidth > 0)")


def save_screenshot(page, name: str) -> None:  # type: ignore[no-untyped-def]
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=SCREENSHOTS / f"{name}.png")


@pytest.fixture
def report(browser, tmp_path: Path) -> Iterator[tuple[Path, object]]:  # type: ignore[no-untyped-def]
    """Yield the path for a report, and a page that fails the test if it requests anything but that file."""
    path = tmp_path / "report.html"
    with watched(browser, path.as_uri()) as page:
        yield path, page


def export_report(folder: Path, path: Path, *more: str) -> str:
    subprocess.run([sys.executable, "launch/dashboard.py", str(folder), "--export", str(path), *more], check=True)
    return path.as_uri()
