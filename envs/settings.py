"""An environment's settings: a dataclass, whose fields are the names, types and defaults of what a recipe may set."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from envs.base import metadata_of, setting

T = TypeVar("T")


def read_settings(kind: type[T], sample: Any = None, args: Any = None) -> T:
    """The settings of a sample, from weak to strong: the defaults of `kind`, a dataclass; `args`; the sample's
    env_config. None counts as left out; names that `kind` has not are passed over. ValueError, naming setting and
    value, for a value of another type and for one that `kind` refuses."""
    config = metadata_of(sample).get("env_config")
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]  # any dataclass
    said = {name: setting(config, name, setting(args, name)) for name in names}
    values = {name: value for name, value in said.items() if value is not None}
    try:
        made: T = _adapter(kind).validate_python(values)  # type: ignore[arg-type]  # a class can be hashed
    except ValidationError as error:
        raise ValueError(_words(error, kind, values)) from error
    return made


@cache
def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _words(error: ValidationError, kind: type, values: Mapping[str, Any]) -> str:
    """The first mistake in one line. For a value of several parts it shows the default, if there is one."""
    first = error.errors()[0]
    if not first["loc"]:  # of the dataclass's own check
        return str(first["ctx"]["error"])
    name = str(first["loc"][0])
    if name not in values:
        return f"{name} is required"
    default = next(field.default for field in fields(kind) if field.name == name)
    several = len(first["loc"]) > 1 or isinstance(default, tuple)
    shown = several and default is not None and default is not MISSING
    why = f"write it like {json.dumps(default)}" if shown else first["msg"].lower()
    return f"{name} = {values[name]!r}: {why}"
