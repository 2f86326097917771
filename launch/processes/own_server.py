"""A ticket server without a learner, in this process: its actors play with the weights that the engines have loaded."""

from __future__ import annotations

import threading
import uuid
from pathlib import Path

from learner.tickets.sources import SampleSource
from learner.tickets.ticket_book import BookSettings
from learner.tickets.ticket_server import TicketServer, TicketServerSettings
from shared.config.recipe import Recipe
from shared.wire.codec import TokenRules
from shared.wire.endpoints import EndpointSettings


class OwnServer:
    """Base class of such servers. It listens on loopback from construction on; its `recipe` has its address for the
    actors. From `begin` on, a thread runs `work`, which a subclass defines, and tells the actors to stop at its end."""

    def __init__(
        self, recipe: Recipe, source: SampleSource, book: BookSettings, folder: Path, rules: TokenRules
    ) -> None:
        """Open the ticket server. `folder` is for refused messages."""
        settings = TicketServerSettings(
            "tcp://127.0.0.1:0",
            folder,
            uuid.uuid4().hex,
            rules,
            endpoint=EndpointSettings(recipe.transport.max_message_bytes),
            max_failure_share=recipe.env.max_failure_share,
        )
        self.ticket_server = TicketServer(source, book, settings)
        actor = recipe.actor.model_copy(update={"learner": self.ticket_server.address})
        transport = recipe.transport.model_copy(update={"keys": ""})  # nothing leaves this machine
        self.recipe = recipe.model_copy(update={"actor": actor, "transport": transport})
        self._thread = threading.Thread(target=self._run, name="own server", daemon=True)

    def begin(self) -> None:
        """Begin to issue tickets of version 0. Call it when the engines serve."""
        self.ticket_server.open(0)
        self._thread.start()

    def work(self) -> str:
        """Play everything; return the reason with which the actors are then told to stop. Raise any exception if it
        fails."""
        raise NotImplementedError

    def failed(self, error: Exception) -> None:
        """Handle the error that has ended the work."""
        raise NotImplementedError

    def _run(self) -> None:
        try:
            reason = self.work()
        except Exception as error:  # noqa: BLE001 - after any error the actors must be told, or they wait for ever
            if not isinstance(error, OSError | RuntimeError | ValueError):
                # The text of another kind of exception may say nothing without its type.
                error = RuntimeError(f"{type(error).__name__}: {error}")
            try:
                self.failed(error)
            finally:
                self.ticket_server.stop(f"the work failed: {error}", failed=True)
        else:
            self.ticket_server.stop(reason)

    def close(self) -> None:
        """Stop the server and its thread. May be called more than once."""
        self.ticket_server.stop("the work is over")
        if self._thread.ident is not None:
            self._thread.join(5.0)
