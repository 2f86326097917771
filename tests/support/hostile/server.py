"""A ticket server in a separate process, so that its memory can be measured: `python -m tests.support.hostile.server
DIR [KEYS]`. It prints its address and the learner's public key, and ends when its standard input does."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from learner.tickets.sources import SeedSource
from learner.tickets.ticket_server import TicketServer, TicketServerSettings
from shared.config.sections import TransportConfig
from shared.keys import learner_keys
from shared.util.process_memory import use_one_heap
from shared.wire.endpoints import EndpointSettings
from tests.support.wires import RULES, book_settings

MAX_MESSAGE_BYTES = 32 * 2**20


def main() -> None:
    use_one_heap()  # as the learner does
    run_dir, *keys = sys.argv[1:]
    allowed = learner_keys(TransportConfig(keys=keys[0]), "tcp://0.0.0.0:*") if keys else None
    settings = TicketServerSettings(
        "tcp://127.0.0.1:*", Path(run_dir), "run-1", RULES, endpoint=EndpointSettings(MAX_MESSAGE_BYTES), keys=allowed
    )
    server = TicketServer(SeedSource(), book_settings(groups_per_version=1000), settings)
    server.open(0)
    print(server.address, flush=True)
    for _ in sys.stdin:
        print(json.dumps(server.metrics()), flush=True)
    server.stop("over")


if __name__ == "__main__":
    main()
