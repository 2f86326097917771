"""What is wrong with a recipe, in one line: the field, the value, where it was said, and the cure."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

ENV_PREFIX = "PRONK_"
_RENAMED = {
    "objective": "objective.name",
    "optimizer": "optimizer.name",
    "lr_schedule": "optimizer.schedule",
    "publish_every": "publish.every",
    "publish_timeout_s": "publish.timeout_s",
    "proof_every": "publish.verify_every",
    "checkpoint_every": "checkpoint.every",
    "checkpoint_in_background": "checkpoint.in_background",
    "keep_checkpoints": "checkpoint.keep",
}


@dataclass(frozen=True, slots=True)
class Override:
    """A value that the environment or the command line has for a field, or for a whole section."""

    key: str  # data.variants
    name: str  # --data.variants, PRONK_DATA__VARIANTS
    value: str


def overrides_of(arguments: Sequence[str]) -> dict[str, Override]:
    """By key; the command line's over the environment's."""
    found = {}
    for name, value in os.environ.items():
        if name.startswith(ENV_PREFIX):
            key = name.removeprefix(ENV_PREFIX).lower().replace("__", ".")
            found[key] = Override(key, name, value)
    for place, argument in enumerate(arguments):
        if argument.startswith("--"):
            key, equals, value = argument[2:].partition("=")
            after = "".join(arguments[place + 1 : place + 2])
            found[key] = Override(key, f"--{key}", value if equals else "" if after.startswith("--") else after)
    return found


def of_overrides(arguments: Sequence[str], known: Mapping[str, FieldInfo]) -> str:
    """What the sources of the settings pass over; empty if there is none of it: a variable that would be a field's if
    its section were one, or if it were written with double underscores, and a section that is given no JSON object.
    Other variables without a double underscore are no fields."""
    single = {key.replace(".", "_"): key for key in known}
    for key, override in overrides_of(arguments).items():
        section, _, field = key.partition(".")
        if override.name.startswith(ENV_PREFIX) and field and section not in _sections(known):
            near = nearest_key(key, known)
            cure = f"did you mean {_variable(near)}?" if near else f"sections are {', '.join(_sections(known))}"
            return f"{override.name}: unknown section {section!r}; {cure}"
        if override.name.startswith(ENV_PREFIX) and not field and key in single:
            return f"{override.name} is no field's variable; did you mean {_variable(single[key])}?"
        if _has_fields(key, known) and not isinstance(_json(override.value), dict):
            nothing = not override.value and not override.name.startswith(ENV_PREFIX)
            said = " without a value" if nothing else f" = {override.value!r}"
            return f"{override.name}{said}: {_is_section(key, known)}"
    return ""


def of_fields(error: ValidationError, path: str, arguments: Sequence[str], known: Mapping[str, FieldInfo]) -> str:
    """The first field that does not fit, of a recipe of `path` and of what was said on top of it."""
    first = error.errors()[0]
    if first["type"] == "value_error":  # of a section's own check, which names value and cure
        return str(first["ctx"]["error"])
    key = ".".join(str(part) for part in first["loc"])
    if new_name(key, known) or first["type"] == "model_type":
        return f"{_place(key, path, arguments)}: {_moved(key, known)}"
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        sections = _sections(known)
        near = nearest_key(key, [*known, *sections])
        cure = f"did you mean {near!r}?" if near else f"sections are {', '.join(sections)}"
        return f"{_place(key, path, arguments)}: unknown key {key!r}; {cure}"
    field = next((each for each in known if key.startswith(f"{each}.")), key)
    if first["type"] == "missing" and field == key:
        key = next((each for each in known if each.startswith(f"{key}.") and known[each].is_required()), key)
        return f"recipe {path!r}: {key!r} is required; set it in the recipe or with --{key}"
    if first["type"] == "missing":  # the second of two numbers
        key, why = field, f"too few values; write it like {_example(known[field])}"
    elif first["type"] == "string_pattern_mismatch":
        why = known[field].description or first["msg"]
    else:
        why = first["msg"].lower()
    return f"{_place(field, path, arguments)}: {key} = {first['input']!r}: {why}"


def of_options(message: str, arguments: Sequence[str], known: Mapping[str, FieldInfo]) -> str:
    """What pydantic-settings could not read of the command line or the environment."""
    overrides = overrides_of(arguments)
    for key in overrides:
        if new_name(key, known) and not _has_fields(key, known):
            return _moved(key, known)
    if unknown := re.search(r"unrecognized arguments: (.*)", message):
        word = unknown.group(1).split(" ")[0]
        key = word.lstrip("-").split("=")[0]
        if not word.startswith("--"):
            cure = f"write it with two dashes, --{key}" if key in known else "options are --section.key VALUE"
            return f"{word!r} is no option; {cure}"
        if field := next((each for each in known if key.startswith(f"{each}.")), ""):
            inner = key.removeprefix(f"{field}.")
            return f"unknown option --{key}; write --{field} '{{\"{inner}\": VALUE}}'"
        near = nearest_key(key, known)
        return f"unknown option --{key}; " + (f"did you mean --{near}?" if near else "options are --section.key VALUE")
    for key, override in overrides.items():
        if not _is_named(key, message) or not (why := _not_json(override.value)):
            continue
        if key in known and _structured(known[key]):
            example = _example(known[key])
            return f"{override.name} = {override.value!r} is not JSON: {why}; write it like {example}"
    return "command line: " + " ".join(message.split())


def _has_fields(key: str, known: Iterable[str]) -> bool:
    """Whether it is a section, or one within a section."""
    return any(each.startswith(f"{key}.") for each in known)


def _is_section(key: str, known: Iterable[str]) -> str:
    field = next(each for each in known if each.startswith(f"{key}."))
    return f"{key} is a section; set a field of it, such as {field}"


def _variable(key: str) -> str:
    return ENV_PREFIX + key.upper().replace(".", "__")


def _place(key: str, path: str, arguments: Sequence[str]) -> str:
    """Where the value of a key was said: the recipe, the command line, or a variable of the environment."""
    overrides, parts = overrides_of(arguments), key.split(".")
    for end in range(len(parts), 0, -1):  # the field itself, or the JSON of a section that holds it
        override = overrides.get(".".join(parts[:end]))
        if override is not None and _holds(override.value, parts[end:]):
            return "command line" if override.name.startswith("--") else override.name
    return f"recipe {path!r}"


def _holds(value: str, inner: Sequence[str]) -> bool:
    """Whether JSON has a value at these names, one within the other; any value does where there are none."""
    found = _json(value) if inner else None
    for name in inner:
        if not isinstance(found, dict) or name not in found:
            return False
        found = found[name]
    return True


def nearest_key(key: str, known: Iterable[str]) -> str:
    """The known key most like `key`, with or without the section between; or an empty string."""
    spellings = {re.sub(r"\..*\.", ".", each): each for each in known} | {each: each for each in known}
    matches = difflib.get_close_matches(key, spellings, n=1, cutoff=0.4)
    return spellings[matches[0]] if matches else ""


def new_name(key: str, known: Iterable[str]) -> str:
    """What a field of the learner is called that had no section of its own once; empty for any other key."""
    section, _, name = key.partition(".")
    if section != "learner" or "." in name:
        return ""
    if name in _RENAMED:
        return f"learner.{_RENAMED[name]}"
    found = [each for each in known if re.fullmatch(rf"learner\.\w+\.{re.escape(name)}", each)]
    return found[0] if len(found) == 1 else ""


def _moved(key: str, known: Iterable[str]) -> str:
    return _is_section(key, known) if _has_fields(key, known) else f"{key} is now called {new_name(key, known)}"


def _sections(known: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(key.partition(".")[0] for key in known))


def _is_named(key: str, message: str) -> bool:
    """Whether the message is about this key: it tells the field on the command line, else its section alone."""
    return f"for {key}:" in message or f'field "{key.partition(".")[0]}"' in message


def _not_json(value: str) -> str:
    """Why it cannot be read; empty if it can."""
    try:
        json.loads(value)
    except ValueError as error:
        return str(error)
    return ""


def _json(value: str) -> Any:
    """What it says; None if it cannot be read."""
    return None if _not_json(value) else json.loads(value)


def _kinds(info: FieldInfo) -> list[Any]:
    """What the annotation and, where it is a union, its members are: tuple, dict, float."""
    return [get_origin(kind) or kind for kind in (info.annotation, *get_args(info.annotation))]


def _structured(info: FieldInfo) -> bool:
    return bool({tuple, list, dict} & set(_kinds(info)))


def _example(info: FieldInfo) -> str:
    """JSON for a field that has several values, in the quotes that a shell wants."""
    said = str(info.annotation)
    if said.startswith("dict"):
        return "'{\"name\": 1}'"
    if said.startswith("list[dict"):
        return "'[{\"name\": 1}]'"
    if "float" in said or "int" in said:
        return "'[1, 2]'"
    choices = [choice for kind in get_args(info.annotation) if get_origin(kind) is Literal for choice in get_args(kind)]
    return f"'{json.dumps(choices[:1] or ['name'])}'"
