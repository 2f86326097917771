"""The embedded engine: Pronk's own server for the part of SGLang's HTTP API that actors and publisher use.

    python -m actor.engine.server --model-path DIR --port 31000 --device cpu --threads 1 --max-batch 64

Requests come in on the event loop's thread, the scheduler's thread computes them, a worker thread receives weights.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence

from actor.engine.server_settings import EngineSettings, parse_arguments  # first: it notes the parent
from shared.keys import is_local, read_api_key
from shared.log import TIME
from shared.util.process_memory import kept_for_ever

log = logging.getLogger("engine")


async def serve(settings: EngineSettings) -> int:
    """Serve until SIGINT, SIGTERM or the parent's death (return 0), or until the model thread fails (return 1). Raise
    OSError if the port is taken, ValueError if the model cannot be served or if the host needs an API key; both before
    the first request is accepted.
    """
    api_key = read_api_key(settings.api_key_file, "--api-key-file")
    if not api_key and not is_local(f"tcp://{settings.host}:{settings.port}"):
        raise ValueError(
            f"--host {settings.host!r} is not loopback, and there is no API key: whoever reaches it could replace the "
            "weights; make one with python -m shared.keys FOLDER --engine and give --api-key-file FOLDER/engine.key"
        )
    with kept_for_ever():
        from actor.engine.app import EngineApp
        from actor.engine.http import HttpServer

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    probe = HttpServer({})
    await probe.start(settings.host, settings.port)  # fails before the model is loaded
    probe.close()
    app = EngineApp.load(settings, stop)
    server = HttpServer(app.routes(), api_key=api_key, max_tokens=settings.max_context, refusals=app.refusals)
    port = await server.start(settings.host, settings.port)
    log.info("serving %s on http://%s:%d", settings.model_path, settings.host, port)
    watch = asyncio.create_task(_watch_parent(settings.parent_pid, stop))
    try:
        await stop.wait()
        await asyncio.sleep(0.1)  # time to send the answers to aborted requests
    finally:
        watch.cancel()
        server.close()
        app.close()
    return 1 if app.scheduler.failed is not None else 0


async def _watch_parent(pid: int, stop: asyncio.Event) -> None:
    while pid and os.getppid() == pid:
        await asyncio.sleep(1.0)
    if pid:
        log.warning("the parent process %d is gone: stopping", pid)
        stop.set()


def main(argv: Sequence[str] | None = None) -> int:
    """Serve; return 0 after a stop by signal, 2 for a mistake in the arguments, 1 if the model thread failed."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", datefmt=TIME, stream=sys.stderr
    )
    settings = parse_arguments(argv)
    try:
        return asyncio.run(serve(settings))
    except (ValueError, OSError) as error:
        print(f"engine: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # a collective that waits for a dead peer must not keep the process alive
