"""The settings of an environment: a pydantic model, as for a recipe's sections, with type, bounds and description of
each field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from envs.base import metadata_of, setting


class EnvSettings(BaseModel):
    """Base class for the settings that `env.args`, `data.variants` and a sample's env_config may set."""

    model_config = ConfigDict(frozen=True)


Settings = TypeVar("Settings", bound=BaseModel)


def read_settings(kind: type[Settings], sample: Any = None, args: Any = None) -> Settings:
    """Return the settings of a sample: the defaults of `kind`, overridden by `args`, overridden by the sample's
    env_config. None counts as not set; names that are no fields of `kind` are ignored. Raise ValueError, naming setting
    and value, for a value of a wrong type or one that `kind` refuses."""
    config = metadata_of(sample).get("env_config")
    given = {name: setting(config, name, setting(args, name)) for name in kind.model_fields}
    values = {name: value for name, value in given.items() if value is not None}
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise ValueError(_words(error, kind, values)) from error


def _words(error: ValidationError, kind: type[BaseModel], values: Mapping[str, Any]) -> str:
    """Return the first mistake in one line; for a value of several parts with the default as an example."""
    first = error.errors()[0]
    if not first["loc"]:  # raised by the model's own validator
        return str(first.get("ctx", {}).get("error", first["msg"]))
    name = str(first["loc"][0])
    if name not in values:
        return f"{name} is required"
    default = kind.model_fields[name].default
    several = len(first["loc"]) > 1 or isinstance(default, tuple)
    shows_default = several and isinstance(default, (int, tuple))
    why = f"write it like {json.dumps(default)}" if shows_default else first["msg"].lower()
    return f"{name} = {values[name]!r}: {why}"
