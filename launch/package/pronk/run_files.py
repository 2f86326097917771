"""Reads what a run has written: metrics, recorded episodes, recipe and result, also while it trains."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pronk.rooms import ours

Form = Literal["records", "pandas", "arrow"]


class RunFiles:
    """A run's folder, such as runs/colour_tiny.

    Raises:
        ValueError: the folder is no run's.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not (self.folder / "recipe.json").is_file():
            raise ValueError(f"{folder} is no folder of a run: it has no recipe.json")

    def __repr__(self) -> str:
        return f"RunFiles({str(self.folder)!r})"

    @property
    def recipe(self) -> dict[str, Any]:
        """Return the recipe as it was resolved, section by section."""
        return self._json("recipe.json")

    @property
    def software(self) -> dict[str, str]:
        """Return the versions of Pronk and of the software that it ran with."""
        return self._json("software.json")

    @property
    def result(self) -> dict[str, Any]:
        """Return what the run reached; {} before its end."""
        return self._json("result.json") if (self.folder / "result.json").is_file() else {}

    @property
    def checkpoints(self) -> list[Path]:
        """Return the folders of its checkpoints, the oldest first."""
        return sorted(self.folder.glob("checkpoints/step_*"))

    def metrics(self, form: Form = "records") -> Any:
        """Return the rows of metrics.jsonl, in the order in which they were written; a row has "step", "time" and the
        metrics that were measured then.

        Args:
            form: "records" for a list of dicts, "pandas" for a DataFrame, "arrow" for a pyarrow.Table. A metric that
                a row does not have is NaN or null in a table.
        """
        text = (self.folder / "metrics.jsonl").read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]  # the run may be writing the last row
        return _as(form, [json.loads(line) for line in whole.splitlines()])

    def episodes(self, form: Form = "records") -> Any:
        """Return a row for each recorded episode: "step", "evaluation" (its name; "" for training), "id", "reward",
        "ending", its metrics, "turns" (their number), "prompt" (JSON), and, for each turn, what the model has "seen"
        and "answers"; "images" are the files of those that were recorded; "error" is why it failed.

        Args:
            form: as in `metrics`.
        """
        return _as(form, list(self._episodes()))

    def _episodes(self) -> Iterator[dict[str, Any]]:
        reader = ours("shared.recordings.reader")
        folder = self.folder / reader.FOLDER
        for place in reader.recordings(folder):
            for episode in reader.episodes(place.path(folder), []):
                yield {
                    **episode.metrics,
                    "step": place.step,
                    "evaluation": place.evaluation,
                    "id": episode.id,
                    "reward": episode.reward,
                    "ending": str(episode.ending),
                    "turns": len(episode.turns),
                    "prompt": episode.prompt,
                    "seen": [turn.seen for turn in episode.turns],
                    "answers": [turn.answer for turn in episode.turns],
                    "images": [str(folder / reader.IMAGES / image.file_name) for image in episode.images],
                    "error": episode.error,
                }

    def _json(self, name: str) -> dict[str, Any]:
        values: dict[str, Any] = json.loads((self.folder / name).read_text(encoding="utf-8"))
        return values


def _as(form: Form, rows: list[dict[str, Any]]) -> Any:
    """Return rows in another form. Raise ValueError for an unknown form, ModuleNotFoundError if its library is not
    installed."""
    if form == "records":
        return rows
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: [row.get(name) for row in rows] for name in names}
    if form == "pandas":
        import pandas

        return pandas.DataFrame(columns)
    if form == "arrow":
        import pyarrow

        return pyarrow.table(columns)
    raise ValueError(f"form = {form!r}: there are records, pandas and arrow")
