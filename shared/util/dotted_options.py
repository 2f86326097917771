"""Options for single values of a free-form field: `--env.args.size 7` stands for `--env.args '{"size": 7}'`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any


def with_json_options(arguments: Sequence[str], fields: Iterable[str]) -> list[str]:
    """Return the arguments with all options `--FIELD.NAME VALUE` of a field as one `--FIELD JSON`, at the place of the
    first. A value is JSON, or else a text; further dots lead into it. An option without a value stays as it is."""
    prefixes = {f"--{field}.": field for field in fields}
    written: list[str] = []
    values: dict[str, dict[str, Any]] = {}
    places: dict[str, int] = {}
    index = 0
    while index < len(arguments):
        argument, index = arguments[index], index + 1
        option, equals, value = argument.partition("=")
        field = next((field for prefix, field in prefixes.items() if option.startswith(prefix)), "")
        has_next = index < len(arguments) and not arguments[index].startswith("--")
        if not field or not (equals or has_next):
            written.append(argument)
            continue
        if not equals:
            value, index = arguments[index], index + 1
        if field not in values:
            values[field], places[field] = {}, len(written) + 1
            written += [f"--{field}", ""]
        _put(values[field], option.removeprefix(f"--{field}.").split("."), _decoded(value))
    for field, inner in values.items():
        written[places[field]] = json.dumps(inner)
    return written


def _put(values: dict[str, Any], names: Sequence[str], value: Any) -> None:
    for name in names[:-1]:
        inner = values.get(name)
        values[name] = inner if isinstance(inner, dict) else {}
        values = values[name]
    values[names[-1]] = value


def _decoded(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value
