"""Files of demonstrations."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from envs import colour
from shared.types import Sample
from tests.support.tiny import png


def write(path: Path, rows: Sequence[dict[str, Any] | str]) -> Path:
    """Write rows as JSON lines, texts as they are; return the path."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def colour_rows(count: int) -> list[dict[str, Any]]:
    """Return right answers to the colour task, with its prompt."""
    rows = []
    for seed in range(count):
        env = colour.build_env(Sample(str(seed), metadata={"seed": seed, "split": "train"}))
        observation = env.format_observation(env.reset()[0])
        content = [
            {"type": "image", "image": "data:image/png;base64," + base64.b64encode(png(part["image"])).decode()}
            if part["type"] == "image"
            else part
            for part in observation["content"]
        ]
        asked = [{"role": "system", "content": colour.SYSTEM_PROMPT}, {"role": "user", "content": content}]
        rows.append({"messages": [*asked, {"role": "assistant", "content": env.colour}]})
    return rows
