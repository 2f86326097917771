"""Plays without a learner: a ticket server of its own, whose groups go into a folder."""

from __future__ import annotations

import threading
import uuid
from dataclasses import replace
from pathlib import Path

from launch.engines.commands import NO_WEIGHTS, EngineSpec
from launch.task_samples import training_samples
from learner.tickets.book import BookSettings
from learner.tickets.server import TicketServer, TicketServerSettings
from shared.codec import TokenRules
from shared.config import Recipe
from shared.log import get_logger
from shared.recordings.groups import Recorder
from shared.transport import SocketSettings

LOG = get_logger("recording")


def with_own_weights(spec: EngineSpec) -> EngineSpec:
    """The engine plays with the weights it loads, as those of version 0, instead of waiting for a learner's."""
    at = spec.command.index(NO_WEIGHTS, spec.command.index("--weight-version"))
    return replace(spec, command=(*spec.command[:at], "0", *spec.command[at + 1 :]))


class Recording:
    """Listens at once, and issues as many tickets as the recipe's run would train on; `recipe` leads actors here.

    The engines play with the weights they were started with. When all groups are in `folder`, actors are told to stop.
    ValueError: the folder cannot be written.
    """

    def __init__(self, recipe: Recipe, folder: Path, rules: TokenRules) -> None:
        learner = recipe.learner
        self._num_groups = learner.groups_per_step * learner.total_steps
        self._timeout_s = learner.wait_timeout_s
        try:
            self._recorder = Recorder(folder)
        except OSError as error:
            raise ValueError(f"--record {folder}: {error}") from error
        book = replace(BookSettings.of(recipe), groups_per_version=self._num_groups, max_staleness=0)
        sockets = SocketSettings(recipe.transport.max_message_bytes, recipe.transport.queue_messages)
        settings = TicketServerSettings(
            "tcp://127.0.0.1:0", folder, uuid.uuid4().hex, rules, learner.actor_timeout_s, sockets=sockets
        )
        self._ticket_server = TicketServer(training_samples(recipe), book, settings)
        self.recipe = recipe.model_copy(
            update={"actor": recipe.actor.model_copy(update={"learner": self._ticket_server.address})}
        )
        self._ticket_server.open(0)
        self._thread = threading.Thread(target=self._run, name="recording", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            for _ in range(self._num_groups):
                for _, group in self._ticket_server.next_batch(1, self._timeout_s):
                    self._recorder.add(group)
        except (TimeoutError, OSError, RuntimeError) as error:
            LOG.error("the recording ends: %s", error)
            self._ticket_server.stop(f"the recording failed: {error}", failed=True)
            return
        LOG.info("%d groups are in %s", self._num_groups, self._recorder.folder)
        self._ticket_server.stop("the recording is complete")

    def close(self) -> None:
        """After the actors have ended, or instead of waiting for them. May be called again."""
        self._ticket_server.stop("the recording is over")
        self._thread.join(5.0)
