"""Tickets without a learner: a ticket server in this process, whose actors play with the engines' own weights."""

from __future__ import annotations

import threading
import uuid
from pathlib import Path

from learner.tickets.book import BookSettings
from learner.tickets.server import TicketServer, TicketServerSettings
from learner.tickets.sources import SampleSource
from shared.codec import TokenRules
from shared.config import Recipe
from shared.transport import SocketSettings


class OwnServer:
    """Listens on loopback at once; `recipe` leads actors here. A thread does the `work` of the kind that it is, from
    `begin` on, and tells the actors to stop at its end."""

    def __init__(
        self, recipe: Recipe, source: SampleSource, book: BookSettings, folder: Path, rules: TokenRules
    ) -> None:
        """`folder`: where messages that break the wire's contract are kept."""
        settings = TicketServerSettings(
            "tcp://127.0.0.1:0",
            folder,
            uuid.uuid4().hex,
            rules,
            recipe.learner.actor_timeout_s,
            sockets=SocketSettings(recipe.transport.max_message_bytes, recipe.transport.queue_messages),
            max_failure_share=recipe.env.max_failure_share,
        )
        self.ticket_server = TicketServer(source, book, settings)
        actor = recipe.actor.model_copy(update={"learner": self.ticket_server.address})
        transport = recipe.transport.model_copy(update={"keys": ""})  # nothing leaves this machine
        self.recipe = recipe.model_copy(update={"actor": actor, "transport": transport})
        self._thread = threading.Thread(target=self._run, name="own server", daemon=True)

    def begin(self) -> None:
        """The engines serve: tickets are issued, as of version 0."""
        self.ticket_server.open(0)
        self._thread.start()

    def work(self) -> str:
        """Until all is played; what to tell the actors then. Any error: it failed."""
        raise NotImplementedError

    def failed(self, error: Exception) -> None:
        """The work has ended with this error."""
        raise NotImplementedError

    def _run(self) -> None:
        try:
            reason = self.work()
        except Exception as error:  # noqa: BLE001 - whatever it is: actors that are not told wait for ever
            if not isinstance(error, OSError | RuntimeError | ValueError):
                error = RuntimeError(f"{type(error).__name__}: {error}")  # whose own words may say nothing
            try:
                self.failed(error)
            finally:
                self.ticket_server.stop(f"the work failed: {error}", failed=True)
        else:
            self.ticket_server.stop(reason)

    def close(self) -> None:
        """After the actors have ended, or instead of waiting for them. May be called again."""
        self.ticket_server.stop("the work is over")
        if self._thread.ident is not None:
            self._thread.join(5.0)
