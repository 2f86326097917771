"""Whom the dashboard answers, what it serves, and what it refuses."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import aiohttp
import pytest
import xxhash
from yarl import URL

from launch.dashboard import serve
from launch.dashboard_server import web
from launch.dashboard_server.api import answer
from launch.dashboard_server.runs import Runs, Unknown
from launch.dashboard_server.security import COOKIE
from tests.support.dashboard.asked import asked
from tests.support.dashboard.folders import own, whole
from tests.support.dashboard.recorded_run import make_run

__all__ = ["own", "whole"]  # fixtures
TOKEN = "a-token-of-the-test-0123"


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "[", "localhost@evil.example:80"])
def test_a_foreign_host_is_refused(whole: Path, host: str) -> None:
    assert asked(whole, "/api/runs", headers={"Host": host})[0] in (400, 403)


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1", "file://"])
def test_a_foreign_origin_is_refused(whole: Path, origin: str) -> None:
    assert asked(whole, "/api/runs", headers={"Origin": origin})[0] == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_nothing_can_be_changed(whole: Path, method: str) -> None:
    assert asked(whole, "/api/runs", method=method)[0] == 403


def test_a_forwarded_port_of_this_machine_is_answered(whole: Path) -> None:
    assert asked(whole, "/api/runs", headers={"Host": "localhost:9000", "Origin": "http://localhost:9000"})[0] == 200


def test_a_token_is_asked_for_of_every_path_and_becomes_a_cookie(whole: Path) -> None:
    for path in ("/", "/api/runs", "/pages/app.js", "/api/runs/sokoban/images/x.png", "/nothing"):
        assert asked(whole, path, token=TOKEN)[0] == 401
        assert asked(whole, path, token=TOKEN, headers={"Authorization": "Bearer another-one"})[0] == 401
    assert asked(whole, f"/?token={TOKEN[:-1]}", token=TOKEN)[0] == 401
    assert asked(whole, f"/api/runs?token={TOKEN}", token=TOKEN)[0] == 401
    status, headers, _ = asked(whole, f"/?token={TOKEN}", token=TOKEN)
    assert status == 303 and "HttpOnly" in headers["Set-Cookie"] and "SameSite=Strict" in headers["Set-Cookie"]
    assert asked(whole, "/api/runs", token=TOKEN, cookies={COOKIE: TOKEN})[0] == 200
    assert asked(whole, "/api/runs", token=TOKEN, headers={"Authorization": f"Bearer {TOKEN}"})[0] == 200


@pytest.mark.parametrize("path", ["/", "/pages/app.js", "/api/runs", "/api/nothing", "/nothing", "/pages/x.js"])
def test_every_answer_forbids_scripts_of_others_and_guessing_of_types(whole: Path, path: str) -> None:
    _, headers, _ = asked(whole, path)
    assert "default-src 'none'" in headers["Content-Security-Policy"] and "unsafe" not in str(headers)
    assert headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    "path",
    [
        "/pages/../web.py",
        "/pages/%2e%2e/web.py",
        "/pages//etc/passwd",
        "/api/runs/../health",
        "/api/runs/..%2f/health",
        "/api/runs/sokoban/images/..%2f..%2fmetrics.jsonl",
        "/api/runs/sokoban/images/x.svg",
        "/api/runs/sokoban/steps/x",
        "/api/runs/sokoban/steps/11",
        "/api/runs/sokoban/steps/99999999999999999999",
        "/api/runs/none/health",
        "/api/runs/sokoban/steps/10/10-0/9",
    ],
)
def test_what_is_no_page_nor_part_of_a_run_is_not_served(whole: Path, path: str) -> None:
    assert asked(whole, URL(path, encoded=True))[0] == 404


def test_links_that_lead_outside_of_the_given_folder_are_not_followed(own: Path, tmp_path_factory) -> None:
    outside = tmp_path_factory.mktemp("outside")
    make_run(outside / "other", steps=2, recorded=(10,), groups=1)
    (own / "linked").symlink_to(outside / "other")
    run = own / "sokoban"
    (run / "secret.log").symlink_to("/etc/hostname")
    (run / "software.json").symlink_to(outside / "other/recipe.json")
    (run / "recordings/step_00000010.rec").unlink()
    (run / "recordings/step_00000010.rec").symlink_to(outside / "other/recordings/step_00000010.rec")
    os.mkfifo(run / "waits.log")
    runs = Runs([own])
    said = answer(runs, "runs/sokoban/health", {})
    assert [run["name"] for run in answer(runs, "runs", {})["runs"]] == ["sokoban"]
    assert [log["name"] for log in said["logs"]] == ["learner.log"] and said["software"] is None
    with pytest.raises(Unknown):
        answer(runs, "runs/sokoban/steps/10", {})


def test_images_are_checked_before_they_are_shown(own: Path) -> None:
    folder = own / "sokoban/recordings/images"
    path = next(folder.glob("*.png"))
    status, headers, body = asked(own, f"/api/runs/sokoban/images/{path.name}")
    assert (status, headers["Content-Type"], body) == (200, "image/png", path.read_bytes())
    path.write_bytes(b"<svg onload=alert(1)>")  # not what its name says
    assert asked(own, f"/api/runs/sokoban/images/{path.name}")[0] == 404
    made = folder / f"{xxhash.xxh3_128_hexdigest(path.read_bytes())}.png"  # what its name says, but no image
    made.write_bytes(path.read_bytes())
    assert asked(own, f"/api/runs/sokoban/images/{made.name}")[0] == 404


@pytest.mark.parametrize("token", ["", TOKEN])
def test_connections_that_send_nothing_keep_nobody_out(whole: Path, monkeypatch: pytest.MonkeyPatch, token) -> None:
    monkeypatch.setattr(web, "MAX_CONNECTIONS", 10)
    monkeypatch.setattr(web, "RESERVED_CONNECTIONS", 4)

    async def main() -> None:
        ready, port = asyncio.Event(), []
        monkeypatch.setattr("builtins.print", lambda line, **_: (port.append(URL(line.split()[1]).port), ready.set()))
        serving = asyncio.create_task(serve(Runs([whole]), "127.0.0.1", 0, token))
        await asyncio.wait_for(ready.wait(), 30)
        silent = [await asyncio.open_connection("127.0.0.1", port[0]) for _ in range(30)]
        bearer = {"Authorization": f"Bearer {token}"}
        async with (
            aiohttp.ClientSession(headers=bearer, timeout=aiohttp.ClientTimeout(20)) as session,
            session.get(f"http://127.0.0.1:{port[0]}/api/runs") as answer,
        ):
            assert answer.status == 200
        assert await asyncio.wait_for(silent[0][0].read(), 5) == b""  # the oldest was closed
        for _, writer in silent:
            writer.close()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    asyncio.run(main())
