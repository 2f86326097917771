"""An example episode among the metrics."""

from __future__ import annotations

from contextlib import suppress

from learner.batch.image_decoder import rgb_of
from learner.metrics.metric_writer import MetricLogger
from shared.types import Trajectory

SHOWN_CHARACTERS = 2**16  # longest transcript


def show(metrics: MetricLogger, step: int, episode: Trajectory) -> None:
    """Write an episode's first images and its transcript."""
    for number, image in enumerate(episode.images[:4]):
        with suppress(Exception):  # an episode that is not trained on may hold any image; it only describes the step
            metrics.image(step, f"episode/picture_{number}", rgb_of(image))
    transcript = "\n".join("    " + line for line in episode.text[:SHOWN_CHARACTERS].splitlines())
    metrics.text(step, "episode/transcript", f"reward {episode.reward:.3f}, {episode.ending}\n\n{transcript}")
