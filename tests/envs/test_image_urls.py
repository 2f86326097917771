"""Images of a dataset that stand at http addresses: downloaded once, within limits."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from envs import image_urls
from envs.datasets import load_dataset
from envs.row_files import write_rows
from tests.support.machine import LocalServer, QuietHandler
from tests.support.odd_images import photo, saved

PNG = saved(photo(), "PNG")


class Pictures(LocalServer):
    """A server of pictures; the path says what it does."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        outer = self

        class Handler(QuietHandler):
            def do_GET(self) -> None:
                outer.asked[self.path] += 1
                if self.path.startswith("/ok") or (self.path == "/busy" and outer.asked[self.path] > 1):
                    self.reply(PNG)
                elif self.path == "/busy":
                    self.reply(b"", 503)
                elif self.path == "/moved":
                    self.reply(b"", 302, {"location": "/ok"})
                elif self.path == "/away":
                    self.reply(b"", 302, {"location": "ftp://127.0.0.1/x"})
                elif self.path == "/circle":
                    self.reply(b"", 302, {"location": "/circle"})
                elif self.path == "/text":
                    self.reply(b"<html>")
                elif self.path == "/large":
                    self.reply(b"x" * 5000)
                elif self.path == "/slow":
                    self.send_response(200)
                    self.end_headers()
                    for _ in range(20):
                        self.wfile.write(b"x")
                        time.sleep(0.1)
                else:
                    self.reply(b"", 404)

        super().__init__(Handler)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pictures]:
    monkeypatch.setattr(image_urls, "FIRST_PAUSE_S", 0.01)
    with closing(Pictures()) as found:
        yield found


def load(tmp_path: Path, *images: Any, **settings: Any) -> Any:
    rows = [{"problem": f"{number}?", "answer": "1", "images": [image]} for number, image in enumerate(images)]
    write_rows(tmp_path / "rows.jsonl", [{"problem": "x?", "answer": "1"}, *rows])
    return load_dataset(tmp_path / "rows.jsonl", **settings)


def test_images_at_addresses_are_downloaded_once(tmp_path: Path, server: Pictures) -> None:
    urls = [f"{server.url}/ok", f"{server.url}/busy", f"{server.url}/moved", {"url": f"{server.url}/ok?2"}]
    for _ in range(2):
        data = load(tmp_path, *urls, image_cache=str(tmp_path / "cache"))
        assert [bytes(sample.images[0].data) for sample in data.samples[1:]] == [PNG] * 4
    assert server.asked == {"/ok": 2, "/busy": 2, "/moved": 1, "/ok?2": 1}


def test_without_a_folder_for_them_addresses_are_not_asked(tmp_path: Path, server: Pictures) -> None:
    data = load(tmp_path, f"{server.url}/ok")
    assert data.report.bad_images == 1 and "set data.image_cache" in data.report.summary() and not server.asked


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/none", "404"),
        ("/away", "it leads to 'ftp://127.0.0.1/x'"),
        ("/circle", "redirect"),
        ("/text", ""),
        ("/large", "more than 0 MiB"),
        ("/slow", "it takes more than 0.5 s"),
    ],
)
def test_an_address_without_an_image_costs_its_row(
    tmp_path: Path, server: Pictures, monkeypatch: pytest.MonkeyPatch, path: str, words: str
) -> None:
    monkeypatch.setattr(image_urls, "MAX_BYTES", 4000)
    monkeypatch.setattr(image_urls, "IMAGE_S", 0.5)
    data = load(tmp_path, server.url + path, image_cache=str(tmp_path / "cache"))
    assert (data.report.samples, data.report.bad_images) == (1, 1)
    assert words in data.report.summary()


def test_a_host_that_fails_again_and_again_is_left_alone(
    tmp_path: Path, server: Pictures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_urls, "AT_ONCE", 1)
    urls = [f"{server.url}/none{number}" for number in range(20)]
    data = load(tmp_path, *urls, image_cache=str(tmp_path / "cache"))
    assert data.report.bad_images == 20 and len(server.asked) == image_urls.MAX_FAILURES


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="image_cache = ") as refused:
        load(tmp_path, "http://127.0.0.1:9/x", image_cache=str(tmp_path / "file" / "cache"))
    assert "\n" not in str(refused.value)
