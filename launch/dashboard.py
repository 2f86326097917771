"""A local web page over run folders: curves, each step's episodes, each turn's image beside its answer, alarms, health.

    python launch/dashboard.py runs                                  # every run in a folder, also while they train
    python launch/dashboard.py runs/sokoban_tiny --export report.html [--episode 4711/0]

It reads files and changes nothing. It listens on this machine alone; with another --host it asks for a token: that of
the environment (PRONK_DASHBOARD_TOKEN), of --token-file, or one that it makes and prints once.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import argparse
import asyncio
import errno
import ipaddress
import os
import secrets
import signal

from launch.dashboard_server.runs import Runs
from shared.config.recipe import fail

TOKEN_ENV = "PRONK_DASHBOARD_TOKEN"
MIN_TOKEN = 16


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    try:
        runs = Runs(options.runs)
        if options.export is not None:
            from launch.dashboard_server.standalone import export

            export(runs, options.export, options.episode)
            print(options.export)
            return 0
        if options.episode:
            raise ValueError("--episode names what --export writes; give --export FILE.html too")
        token = token_of(options.token_file, options.host)
        asyncio.run(serve(runs, options.host, options.port, token))
    except (ValueError, OSError) as error:
        return fail(error)
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("runs", nargs="+", type=Path, metavar="RUNS", help="a run's folder, or a folder that holds runs")
    made.add_argument("--port", type=int, default=8321, help="0 = any that is free")
    made.add_argument("--host", default="127.0.0.1", help="the address to listen on")
    made.add_argument("--token-file", type=Path, metavar="FILE", help="holds the token that is asked for")
    made.add_argument("--export", type=Path, metavar="FILE.html", help="write a report that stands alone, and end")
    made.add_argument("--episode", default="", metavar="ID", help="the report is of this episode: TICKET/INDEX")
    return made


def token_of(file: Path | None, host: str) -> str:
    """Return the token that readers must give; "" if none is required. Raise ValueError for a token that is too short
    or has unsuitable characters."""
    if file is not None:
        token = file.read_text(encoding="utf-8").strip()
    else:
        token = os.environ.get(TOKEN_ENV, "")
        if not token and not is_loopback(host):
            return secrets.token_urlsafe(32)
        if not token:
            return ""
    if len(token) < MIN_TOKEN or not token.isascii() or not token.isprintable() or set(token) & set(' ";,\\'):
        raise ValueError(f"the token of {file or TOKEN_ENV} is no {MIN_TOKEN} or more letters and digits")
    return token


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


async def serve(runs: Runs, host: str, port: int, token: str) -> None:
    """Serve until interrupted. Raise ValueError if it cannot listen on the address."""
    from aiohttp import web

    from launch.dashboard_server.web import Server

    server = Server(runs, host, token)
    runner = web.AppRunner(server.app, access_log=None, shutdown_timeout=1.0, handle_signals=False)
    await runner.setup()
    assert runner.server is not None
    server.connections.watch(runner.server)
    ended = asyncio.Event()
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signal_number, ended.set)
    try:
        await web.TCPSite(runner, host.strip("[]"), port).start()
        at = f"[{host.strip('[]')}]" if ":" in host else host
        address = f"http://{at}:{runner.addresses[0][1]}/{f'?token={token}' if token else ''}"
        print(f"dashboard: {address}  (Ctrl-C ends it)", flush=True)
        await ended.wait()
    except OverflowError:
        raise ValueError(f"--port {port}: give a port from 0 to 65535") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ValueError(f"port {port} of {host} is in use; choose another one with --port") from None
        raise ValueError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    finally:
        await runner.cleanup()


if __name__ == "__main__":
    sys.exit(main())
