"""Serve an environment over HTTP; `envs.remote` plays it.

    python -m envs.serve my_env.py --port 8100
    python -m envs.serve envs.sokoban --env.args.render_mode text

A recipe then has env.module = "envs.remote" and env.args = {url = "http://127.0.0.1:8100"}. Ctrl-C ends it.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:  # started by its path, from anywhere
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import asyncio
import errno
import logging
import os
import signal
from typing import Any

from aiohttp import web

from envs.env_server import EnvServer, ServeLimits
from envs.loader import check_settings, load_env, load_module, system_prompt
from envs.play import add_object_option, parse, settings
from shared.keys import is_local, read_api_key
from shared.log import TIME

END_S = 3.0  # for environments to close


def main(argv: list[str] | None = None) -> int:
    """Serve until a signal; return 0 then, and 2 for a mistake in the arguments."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", datefmt=TIME, stream=sys.stderr
    )
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    options = parse(command_line(), argv)
    try:
        return asyncio.run(serve(options))
    except OSError as error:
        place = f"port {options.port} on {options.host}"
        taken = error.errno == errno.EADDRINUSE
        why = f"{place} is taken: choose another with --port" if taken else f"{place}: {error.strerror or error}"
    except ValueError as error:
        why = " ".join(str(error).split())
    print(f"error: {why}", file=sys.stderr)
    return 2


def command_line() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("module", help="dotted path or .py file with build_env")
    options.add_argument("--host", default="127.0.0.1", help="address to listen on; off loopback it needs an API key")
    options.add_argument("--port", type=int, default=8100, help="0 = a free one, which is printed")
    options.add_argument("--api-key-file", default="", help="file with the API key that players must have (mode 0600)")
    options.add_argument("--sessions", type=int, default=256, help="episodes at once")
    options.add_argument("--idle", type=float, default=600.0, help="seconds after which an unused session is closed")
    options.add_argument("--limit", type=float, default=30.0, help="seconds that one call may take")
    options.add_argument(
        "--env.max_turns", dest="max_turns", type=int, default=8, help="unless the player says another"
    )
    add_object_option(options, "env.args", "settings of the environment; a player's own override them")
    return options


async def serve(options: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM. Raise ValueError or OSError, before the first request, for what cannot be
    served."""
    key = read_api_key(options.api_key_file, "--api-key-file")
    if not key and not is_local(f"tcp://{options.host}:{options.port or 1}"):
        raise ValueError(
            f"--host {options.host!r} is not loopback, and there is no API key: make one with python -m shared.keys "
            "FOLDER --engine, and give --api-key-file FOLDER/engine.key"
        )
    server = EnvServer(*_served(options), ServeLimits(options.sessions, options.idle, options.limit), key)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    runner = web.AppRunner(server.application(), handle_signals=False, shutdown_timeout=END_S)
    await runner.setup()
    idle = asyncio.create_task(server.close_idle())
    try:
        site = web.TCPSite(runner, options.host, options.port)
        await site.start()
        url = f"http://{options.host}:{runner.addresses[0][1]}"
        print(f"serving {options.module} on {url}, at most {options.sessions} sessions; Ctrl-C ends it", flush=True)
        await stop.wait()
    finally:
        idle.cancel()
        await runner.cleanup()
        count = await server.close(END_S)
    print(f"ended with {count} open sessions", flush=True)
    return 0


def _served(options: argparse.Namespace) -> tuple[Any, Any, dict[str, Any]]:
    args = settings(options)
    module, build_env = load_module(options.module), load_env(options.module)
    check_settings(module, args, "--env.args")
    system_prompt(module, args)
    if hasattr(module, "TOOLS") or hasattr(module, "tools"):
        raise ValueError(f"{options.module} has tools for the chat template, which are not served: play it directly")
    return module, build_env, args


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # threads of calls that hang do not keep it
