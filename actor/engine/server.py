"""The embedded engine: a server of our own for the part of SGLang's HTTP API that actors and publisher use.

    python -m actor.engine.server --model-path DIR --port 31000 --device cpu --threads 1 --max-batch 64

Requests come in on the event loop's thread, the scheduler's thread computes them, a worker thread receives weights.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass

PARENT_PID = os.getppid()  # before the slow imports: a parent that dies during them is noticed all the same


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """`slots` 0 = twice `max_batch`: sequences between two turns keep their KV. `parent_pid` 0 = do not watch."""

    model_path: str
    port: int
    host: str = "127.0.0.1"
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 1
    max_batch: int = 64
    slots: int = 0
    max_context: int = 2048
    min_pixels: int = 0
    max_pixels: int = 0
    request_timeout_s: float = 300.0
    update_timeout_s: float = 120.0
    weight_version: str = "0"
    parent_pid: int = 0
    api_key_file: str = ""


def parse_arguments(argv: Sequence[str] | None = None) -> EngineSettings:
    parser = argparse.ArgumentParser(prog="python -m actor.engine.server", description="the embedded engine")
    parser.add_argument("--model-path", required=True, help="folder of a Qwen3-VL model")
    parser.add_argument("--port", type=int, required=True, help="0 takes a free one, named in the log")
    parser.add_argument("--host", default="127.0.0.1", help="others than loopback only with --api-key-file")
    parser.add_argument("--api-key-file", default="", help="file of the key that each request must carry")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of the model")
    parser.add_argument("--max-batch", type=int, default=64, help="sequences that one step computes")
    parser.add_argument("--slots", type=int, default=0, help="sequences whose KV is kept; 0 = twice --max-batch")
    parser.add_argument("--max-context", type=int, default=2048, help="tokens of one sequence, images expanded")
    parser.add_argument("--min-pixels", type=int, default=0, help="images below are enlarged; 0 = the model's own")
    parser.add_argument("--max-pixels", type=int, default=0, help="images above are reduced; 0 = the model's own")
    parser.add_argument("--request-timeout-s", type=float, default=300.0)
    parser.add_argument("--update-timeout-s", type=float, default=120.0, help="longest wait for one bucket")
    parser.add_argument("--weight-version", default="0", help="name of the weights in --model-path")
    parser.add_argument("--parent-pid", type=int, default=PARENT_PID, help="exit when it is gone; 0 = do not watch")
    return EngineSettings(**vars(parser.parse_args(argv)))


async def serve(settings: EngineSettings) -> int:
    """Runs until SIGINT, SIGTERM, the parent's death (0) or the model thread's failure (1).

    OSError if the port is taken, ValueError if the model cannot be served or the host be listened on without a key;
    both before a request is accepted.
    """
    from shared.keys import is_local, read_api_key

    api_key = read_api_key(settings.api_key_file, "--api-key-file")
    if not api_key and not is_local(f"tcp://{settings.host}:{settings.port}"):
        raise ValueError(
            f"--host {settings.host!r} is not loopback, and there is no API key: whoever reaches it could replace the "
            "weights; make one with python -m shared.keys FOLDER --engine and give --api-key-file FOLDER/engine.key"
        )
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
    server = HttpServer(app.routes(), api_key=api_key)
    port = await server.start(settings.host, settings.port)
    logging.getLogger("engine").info("serving %s on http://%s:%d", settings.model_path, settings.host, port)
    watch = asyncio.create_task(_watch_parent(settings.parent_pid, stop))
    try:
        await stop.wait()
        await asyncio.sleep(0.1)  # answers to aborted requests go out
    finally:
        watch.cancel()
        server.close()
        app.close()
    return 1 if app.scheduler.failed is not None else 0


async def _watch_parent(pid: int, stop: asyncio.Event) -> None:
    while pid and os.getppid() == pid:
        await asyncio.sleep(1.0)
    if pid:
        logging.getLogger("engine").warning("the parent process %d is gone: stopping", pid)
        stop.set()


def main(argv: Sequence[str] | None = None) -> int:
    """0 after a stop by signal, 2 for a mistake in the arguments, 1 if the model thread failed."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", stream=sys.stderr)
    settings = parse_arguments(argv)
    try:
        return asyncio.run(serve(settings))
    except (ValueError, OSError) as error:
        print(f"engine: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # a collective that waits for a dead peer must not keep the process
