"""An episode to look at, among the metrics."""

from __future__ import annotations

from contextlib import suppress

from learner.images import rgb_of
from learner.metrics.writer import MetricLogger
from shared.types import Trajectory

SHOWN_CHARACTERS = 2**16  # of a transcript


def show(metrics: MetricLogger, step: int, episode: Trajectory) -> None:
    """Its first images and its transcript."""
    for number, image in enumerate(episode.images[:4]):
        with suppress(ValueError):  # an episode that is not trained on may hold what is no image
            metrics.image(step, f"episode/picture_{number}", rgb_of(image))
    transcript = "\n".join("    " + line for line in episode.text[:SHOWN_CHARACTERS].splitlines())
    metrics.text(step, "episode/transcript", f"reward {episode.reward:.3f}, {episode.ending}\n\n{transcript}")
