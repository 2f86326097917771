"""A recipe as a TOML file: what differs from the defaults."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from shared.config import ConfigError, Recipe, known_fields, load_recipe

_BARE = re.compile(r"[A-Za-z0-9_-]+")
SECRET = "alarms.webhook"


def recipe_toml(recipe: Recipe) -> str:
    """ConfigError for a null that the default is not: TOML has none. The webhook stays out: it may hold a secret."""
    tables: dict[str, list[str]] = {}
    for field, info in known_fields().items():
        value: Any = recipe.model_dump(mode="json")
        for name in field.split("."):
            value = value[name]
        default = None if info.is_required() else _plain(info.get_default(call_default_factory=True))
        if value == default or field == SECRET:
            continue
        if value is None:
            raise ConfigError(f"{field} = null cannot be written into a file: leave it out, and give it when you start")
        table, _, name = field.rpartition(".")
        tables.setdefault(table, []).append(f"{name} = {_toml(value)}")
    note = f"# {SECRET} is not written here: set PRONK_ALARMS__WEBHOOK\n" if recipe.alarms.webhook else ""
    return note + "\n".join("\n".join([f"[{table}]", *lines, ""]) for table, lines in tables.items())


def save(recipe: Recipe, path: Path, what: str) -> None:
    """Writes it, with a line that says `what` it is. ConfigError if it cannot be written, or would not be read back."""
    text = recipe_toml(recipe)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {what}\n{text}", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--save {path}: {error.strerror}") from None
    load_recipe(str(path))


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    pairs = (f"{key if _BARE.fullmatch(key) else json.dumps(key)} = {_toml(item)}" for key, item in value.items())
    return f"{{ {', '.join(pairs)} }}"
