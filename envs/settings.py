"""An environment's settings: a record as a recipe's sections are, with the type, bounds and meaning of each field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from envs.base import metadata_of, setting


class EnvSettings(BaseModel):
    """What `env.args`, `data.variants` and a sample's env_config may set."""

    model_config = ConfigDict(frozen=True)


Settings = TypeVar("Settings", bound=BaseModel)


def read_settings(kind: type[Settings], sample: Any = None, args: Any = None) -> Settings:
    """The settings of a sample, from weak to strong: the defaults of `kind`, `args`, the sample's env_config. None
    counts as left out; names that `kind` has not are passed over. ValueError, naming setting and value, for a value of
    another type and for one that `kind` refuses."""
    config = metadata_of(sample).get("env_config")
    said = {name: setting(config, name, setting(args, name)) for name in kind.model_fields}
    values = {name: value for name, value in said.items() if value is not None}
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise ValueError(_words(error, kind, values)) from error


def _words(error: ValidationError, kind: type[BaseModel], values: Mapping[str, Any]) -> str:
    """The first mistake in one line. For a value of several parts it shows the default, if there is one."""
    first = error.errors()[0]
    if not first["loc"]:  # of the record's own check
        return str(first.get("ctx", {}).get("error", first["msg"]))
    name = str(first["loc"][0])
    if name not in values:
        return f"{name} is required"
    default = kind.model_fields[name].default
    several = len(first["loc"]) > 1 or isinstance(default, tuple)
    shown = several and isinstance(default, (int, tuple))
    why = f"write it like {json.dumps(default)}" if shown else first["msg"].lower()
    return f"{name} = {values[name]!r}: {why}"
