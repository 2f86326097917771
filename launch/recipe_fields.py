"""Dotted fields of a recipe (`learner.optimizer.lr`): finding those that the user has set, setting and comparing
fields, saving a recipe."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from shared.config.errors import ENV_PREFIX, fields_of_items
from shared.config.recipe import WITH_SECRETS, ConfigError, Recipe, dotted_values, known_fields, load_recipe
from shared.log import get_logger

_BARE = re.compile(r"[A-Za-z0-9_-]+")


def given_fields(overrides: Sequence[str]) -> set[str]:
    """Return the fields that the command line or the environment sets."""
    fields = {word[2:].partition("=")[0] for word in overrides if word.startswith("--")}
    variables = [name.removeprefix("PRONK_") for name in os.environ if name.startswith("PRONK_")]
    fields |= {name.lower().replace("__", ".") for name in variables}
    return fields & known_fields().keys()


def without_field(overrides: Sequence[str], field: str) -> list[str]:
    """Return the command line words without those that set `field`."""
    words, left = list(overrides), []
    while words:
        word = words.pop(0)
        if word == f"--{field}":
            del words[:1]
        elif not word.startswith(f"--{field}="):
            left.append(word)
    return left


def set_fields(recipe: Recipe, fields: Mapping[str, Any]) -> Recipe:
    """Return the recipe with these fields set, checked as a whole. Raise ValueError if they contradict others."""
    values = recipe.model_dump()
    for key, value in fields.items():
        *sections, name = key.split(".")
        section = values
        for part in sections:
            section = section[part]
        section[name] = value
    return Recipe.model_validate(values)


def changed_fields(recipe: Recipe, fields: Mapping[str, Any], given: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return the fields whose values differ from the recipe's, without those in `given`, which the user has set."""
    return {name: value for name, value in fields.items() if name not in given and value != attrgetter(name)(recipe)}


def as_options(fields: Mapping[str, Any]) -> list[str]:
    """Return fields as command line words."""
    return [
        word
        for name, value in fields.items()
        for word in (f"--{name}", value if isinstance(value, str) else json.dumps(value))
    ]


def recipe_toml(recipe: Recipe) -> str:
    """Return a recipe as TOML: the fields that differ from the defaults. Values with secrets are left out, and a
    comment names each. Raise ConfigError for a null that differs from the default, since TOML has no null."""
    tables: dict[str, list[str]] = {}
    secrets = secret_values(recipe)
    dumped = dotted_values(recipe.model_dump(mode="json"))
    for field, info in known_fields().items():
        value = dumped[field]
        if isinstance(value, dict):
            value = {key: each for key, each in value.items() if f"{field}.{key}" not in secrets}
        if items := fields_of_items(info):
            value = [_without_defaults(item, items) for item in value]
        if value == json_default(info) or field in secrets:
            continue
        if value is None:
            raise ConfigError(f"{field} = null cannot be written into a file: leave it out, and give it when you start")
        table, _, name = field.rpartition(".")
        tables.setdefault(table, []).append(f"{name} = {_toml(value)}")
    notes = "".join(f"# {name} is not written here: set {variable}\n" for name, variable in secrets.items())
    top = "".join(f"{line}\n" for line in tables.pop("", ()))  # before the first table
    return notes + top + "\n".join("\n".join([f"[{table}]", *lines, ""]) for table, lines in tables.items())


def secret_values(recipe: Recipe) -> dict[str, str]:
    """Return the names of the values that hold secrets (`alarms.webhook`, `env.args.api_key`), each with the variable
    of the environment that sets it."""
    redacted = dotted_values(recipe.model_dump(mode="json"))
    with_secrets = dotted_values(recipe.model_dump(mode="json", context=WITH_SECRETS))
    secrets = {"alarms.webhook": f"{ENV_PREFIX}ALARMS__WEBHOOK"} if recipe.alarms.webhook else {}
    for field in known_fields():
        shown, value = redacted[field], with_secrets[field]
        if shown == value:
            continue
        inner = [f".{key}" for key in value if shown.get(key) != value[key]] if isinstance(value, dict) else [""]
        secrets |= {field + key: ENV_PREFIX + field.upper().replace(".", "__") for key in inner}
    return secrets


def _without_defaults(item: Mapping[str, Any], fields: Mapping[str, FieldInfo]) -> dict[str, Any]:
    """Return the fields of an item of a list of sections that differ from their defaults, sections in it too."""
    left = {}
    for name, value in item.items():
        default = fields[name].get_default(call_default_factory=True)
        if isinstance(default, BaseModel):
            value = _without_defaults(value, type(default).model_fields)
            default = {}
        if fields[name].is_required() or value != json.loads(json.dumps(default)):
            left[name] = value
    return left


def json_default(info: FieldInfo) -> Any:
    """Return a field's default as JSON has it, where tuples are lists; None if the field has none."""
    return None if info.is_required() else json.loads(json.dumps(info.get_default(call_default_factory=True)))


def save_recipe(recipe: Recipe, path: Path, title: str) -> None:
    """Write a recipe below a comment with its title. Raise ConfigError if it cannot be written or not be read back."""
    text = recipe_toml(recipe)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {title}\n{text}", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--save {path}: {error.strerror}") from None
    load_recipe(str(path))
    for name, variable in secret_values(recipe).items():
        get_logger("recipe").warning("%s is a secret and is not written into %s: set %s", name, path, variable)


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
