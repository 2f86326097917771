"""Records groups without a learner: a ticket server whose groups are written into a folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from launch.processes.own_server import OwnServer
from launch.task_samples import training_samples
from learner.tickets.ticket_book import BookSettings
from shared.config.recipe import Recipe
from shared.log import get_logger
from shared.recordings.group_files import GroupWriter
from shared.wire.codec import TokenRules

LOG = get_logger("recording")


class RecordingServer(OwnServer):
    """Issues as many tickets as the recipe's run would train on. The constructor raises ValueError if the folder cannot
    be written."""

    def __init__(self, folder: Path, recipe: Recipe, rules: TokenRules) -> None:
        learner = recipe.learner
        self._num_groups = learner.groups_per_step * learner.total_steps
        self._timeout_s = learner.wait_timeout_s
        try:
            self._recorder = GroupWriter(folder)
        except OSError as error:
            raise ValueError(f"--record {folder}: {error}") from error
        book = replace(BookSettings.of(recipe), groups_per_version=self._num_groups, max_staleness=0)
        super().__init__(recipe, training_samples(recipe), book, folder, rules)

    def work(self) -> str:
        for _ in range(self._num_groups):
            for _, group in self.ticket_server.next_batch(1, self._timeout_s):
                self._recorder.add(group)
            self.ticket_server.commit()  # else actors and this process would keep the played groups
        LOG.info("%d groups are in %s", self._num_groups, self._recorder.folder)
        return "the recording is complete"

    def failed(self, error: Exception) -> None:
        LOG.error("the recording ends: %s", error)
