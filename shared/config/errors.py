"""Error messages for recipes, each in one line: the field, the value, where it was set, and the cure."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

ENV_PREFIX = "PRONK_"


# What other trainers call a field, by the last part or the last two parts of its name there.
OTHER_NAMES = {
    **dict.fromkeys(("batch_size", "train_batch_size", "rollout_batch_size"), "learner.groups_per_step"),
    **dict.fromkeys(("num_generations", "rollout_n", "rollout.n", "n_samples_per_prompt"), "learner.group_size"),
    **dict.fromkeys(("learning_rate", "actor_lr", "optim.lr"), "learner.optimizer.lr"),
    **dict.fromkeys(
        ("max_steps", "num_steps", "total_training_steps", "epochs", "total_epochs", "num_train_epochs"),
        "learner.total_steps",
    ),
    **dict.fromkeys(("beta", "kl_loss_coef", "kl_coeff"), "learner.objective.kl_coef"),
    **dict.fromkeys(("max_completion_length", "max_response_length", "max_new_tokens"), "env.turn_tokens"),
    **dict.fromkeys(("model_name_or_path", "model_path", "hf_checkpoint"), "model.path"),
    **dict.fromkeys(("train_files", "dataset", "prompt_data", "dataset_name"), "data.source"),
    **dict.fromkeys(("val_files", "eval_dataset"), "data.eval_source"),
    **dict.fromkeys(("adv_estimator", "advantage_estimator", "loss_type"), "learner.objective.name"),
}


@dataclass(frozen=True, slots=True)
class Override:
    """A value that the environment or the command line sets for a field, or for a whole section."""

    key: str  # data.variants
    name: str  # --data.variants, PRONK_DATA__VARIANTS
    value: str


def overrides_of(arguments: Sequence[str]) -> dict[str, Override]:
    """Collect the overrides by key; the command line takes precedence over the environment."""
    overrides = {}
    for name, value in os.environ.items():
        if name.startswith(ENV_PREFIX):
            key = name.removeprefix(ENV_PREFIX).lower().replace("__", ".")
            overrides[key] = Override(key, name, value)
    for index, argument in enumerate(arguments):
        if argument.startswith("--"):
            key, equals, value = argument[2:].partition("=")
            following = "".join(arguments[index + 1 : index + 2])
            if not equals:
                value = "" if following.startswith("--") else following
            overrides[key] = Override(key, f"--{key}", value)
    return overrides


def describe_ignored(arguments: Sequence[str], known: Mapping[str, FieldInfo]) -> str:
    """Describe the first override that pydantic would silently ignore; empty if there is none. These are: a variable
    with an unknown section, a field's variable written with single underscores, and a section whose value is no JSON
    object. Other variables without a double underscore are not meant as fields."""
    single = {key.replace(".", "_"): key for key in known}
    for key, override in overrides_of(arguments).items():
        section, _, field = key.partition(".")
        if override.name.startswith(ENV_PREFIX) and field and section not in _sections(known):
            near = nearest_key(key, known)
            cure = f"did you mean {_variable(near)}?" if near else f"sections are {', '.join(_sections(known))}"
            return f"{override.name}: unknown section {section!r}; {cure}"
        if override.name.startswith(ENV_PREFIX) and not field and key in single:
            return f"{override.name} is no field's variable; did you mean {_variable(single[key])}?"
        if _has_fields(key, known) and not isinstance(_parse_json(override.value), dict):
            nothing = not override.value and not override.name.startswith(ENV_PREFIX)
            written = " without a value" if nothing else f" = {override.value!r}"
            return f"{override.name}{written}: {_is_section(key, known)}"
    return ""


def describe_invalid_field(
    error: ValidationError, path: str, arguments: Sequence[str], known: Mapping[str, FieldInfo]
) -> str:
    """Describe the first invalid field of the recipe in `path` with its overrides."""
    first = error.errors()[0]
    if first["type"] == "value_error":  # raised by a section's own check, which names value and cure
        return str(first["ctx"]["error"])
    key = ".".join(str(part) for part in first["loc"])
    if wrong := _describe_item(first["type"], key, known):
        return f"{_source(key, path, arguments)}: {wrong}"
    if first["type"] == "model_type":
        return f"{_source(key, path, arguments)}: {_is_section(key, known)}"
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        sections = _sections(known)
        near = nearest_key(key, [*known, *sections])
        cure = f"did you mean {near!r}?" if near else f"sections are {', '.join(sections)}"
        return f"{_source(key, path, arguments)}: unknown key {key!r}; {cure}"
    field = next((each for each in known if key.startswith(f"{each}.")), key)
    if first["type"] == "missing" and field == key:
        key = next((each for each in known if each.startswith(f"{key}.") and known[each].is_required()), key)
        return f"recipe {path!r}: {key!r} is required; set it in the recipe or with --{key}"
    if first["type"] == "missing":  # a tuple field lacks its second number
        key, why = field, f"too few values; write it like {_example(known[field])}"
    elif first["type"] == "string_pattern_mismatch":
        why = known[field].description or first["msg"]
    else:
        why = first["msg"].lower()
    return f"{_source(field, path, arguments)}: {key} = {first['input']!r}: {why}"


def fields_of_items(info: FieldInfo) -> Mapping[str, FieldInfo]:
    """Return the fields of the sections that a field is a list of; empty for any other field."""
    kind = next(iter(get_args(info.annotation)), None)
    return kind.model_fields if isinstance(kind, type) and issubclass(kind, BaseModel) else {}


def _describe_item(kind: str, key: str, known: Mapping[str, FieldInfo]) -> str:
    """Describe a field that is unknown to, missing in, or misspelled in an item of a list of sections, such as
    `tasks.0.wieght`; empty for other mistakes."""
    name = next((each for each in known if key.startswith(f"{each}.")), "")
    fields = fields_of_items(known[name]) if name else {}
    number, _, field = key.removeprefix(f"{name}.").partition(".")
    if not fields or not number.isdecimal():
        return ""
    place = f"[[{name}]] number {int(number) + 1}"
    if kind == "missing" and field in fields:
        return f"{place} has no {field}; give it one"
    outer = field.partition(".")[0]
    if kind == "missing" and outer in fields:
        return f"{place}: {outer} has too few values: it is {fields[outer].description}"
    if kind == "extra_forbidden":
        near = difflib.get_close_matches(field, fields, n=1, cutoff=0.4)
        cure = f"did you mean {near[0]!r}?" if near else f"it may have {', '.join(fields)}"
        return f"{place}: unknown key {field!r}; {cure}"
    if kind == "string_pattern_mismatch":
        return f"{place}: {field} is {fields[field].description}"
    return ""


def describe_unreadable_option(message: str, arguments: Sequence[str], known: Mapping[str, FieldInfo]) -> str:
    """Describe the option or variable that pydantic-settings could not read."""
    overrides = overrides_of(arguments)
    if unknown := re.search(r"unrecognized arguments: (.*)", message):
        word = unknown.group(1).split(" ")[0]
        key = word.lstrip("-").split("=")[0]
        if not word.startswith("--"):
            cure = f"write it with two dashes, --{key}" if key in known else "options are --section.key VALUE"
            return f"{word!r} is no option; {cure}"
        if field := next((each for each in known if key.startswith(f"{each}.")), ""):
            if fields_of_items(known[field]):
                return f"unknown option --{key}; {field} is a list: give --{field} as JSON, or write it into the recipe"
            inner = key.removeprefix(f"{field}.")
            return f"unknown option --{key}; write --{field} '{{\"{inner}\": VALUE}}'"
        near = nearest_key(key, known)
        return f"unknown option --{key}; " + (f"did you mean --{near}?" if near else "options are --section.key VALUE")
    if bare := re.search(r"argument --(\S+): expected one argument", message):
        example = "true" if bare[1] in known and bool in _kinds(known[bare[1]]) else "VALUE"
        return f"--{bare[1]} has no value: write --{bare[1]} {example}"
    for key, override in overrides.items():
        if not _is_named(key, message) or not (why := _json_error(override.value)):
            continue
        if key in known and _structured(known[key]):
            example = _example(known[key])
            return f"{override.name} = {override.value!r} is not JSON: {why}; write it like {example}"
    return "command line: " + " ".join(message.split())


def _has_fields(key: str, known: Iterable[str]) -> bool:
    """Tell whether a key is a section, or a section within another one."""
    return any(each.startswith(f"{key}.") for each in known)


def _is_section(key: str, known: Iterable[str]) -> str:
    field = next(each for each in known if each.startswith(f"{key}."))
    return f"{key} is a section; set a field of it, such as {field}"


def _variable(key: str) -> str:
    return ENV_PREFIX + key.upper().replace(".", "__")


def _source(key: str, path: str, arguments: Sequence[str]) -> str:
    """Return where the value of a key was set: the recipe, the command line, or the name of an environment variable."""
    overrides, parts = overrides_of(arguments), key.split(".")
    for end in range(len(parts), 0, -1):  # the field itself, or a section given as JSON that contains it
        override = overrides.get(".".join(parts[:end]))
        if override is not None and _holds(override.value, parts[end:]):
            return _place(override)
    # a misspelled part in the middle of a name: the error knows only the part
    inner = next((override for name, override in overrides.items() if name.startswith(f"{key}.")), None)
    return _place(inner) if inner is not None else f"recipe {path!r}"


def _place(override: Override) -> str:
    return "command line" if override.name.startswith("--") else override.name


def _holds(value: str, inner: Sequence[str]) -> bool:
    """Tell whether the JSON text `value` has a value at the nested names `inner`; always true if `inner` is empty."""
    content = _parse_json(value) if inner else None
    for name in inner:
        if not isinstance(content, dict) or name not in content:
            return False
        content = content[name]
    return True


def nearest_key(key: str, known: Iterable[str]) -> str:
    """Return the known key that is most like `key`, compared with and without its middle sections; empty if none is
    close."""
    parts = key.replace("-", "_").split(".")
    for last in (".".join(parts[-2:]), parts[-1]):
        if (usual := OTHER_NAMES.get(last, "")) in known:
            return usual
    spellings = {re.sub(r"\..*\.", ".", each): each for each in known} | {each: each for each in known}
    is_foreign = len(parts) > 2 and not difflib.get_close_matches(parts[0], _sections(known), cutoff=0.6)
    matches = difflib.get_close_matches(key, spellings, n=1, cutoff=0.7 if is_foreign else 0.4)
    return spellings[matches[0]] if matches else ""


def _sections(known: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(key.partition(".")[0] for key in known))


def _is_named(key: str, message: str) -> bool:
    """Tell whether pydantic's message is about this key. It names the field for the command line, only the section
    otherwise."""
    return f"for {key}:" in message or f'field "{key.partition(".")[0]}"' in message


def _json_error(value: str) -> str:
    """Return why a value is not JSON; empty if it is."""
    try:
        json.loads(value)
    except ValueError as error:
        return str(error)
    return ""


def _parse_json(value: str) -> Any:
    """Parse a value; None if it is not JSON."""
    return None if _json_error(value) else json.loads(value)


def _kinds(info: FieldInfo) -> list[Any]:
    """Return the types of a field, such as tuple, dict or float: its annotation's and, for a union, those of its
    members."""
    return [get_origin(kind) or kind for kind in (info.annotation, *get_args(info.annotation))]


def _structured(info: FieldInfo) -> bool:
    return bool({tuple, list, dict} & set(_kinds(info)))


def _example(info: FieldInfo) -> str:
    """Return example JSON for a field that has several values, quoted for a shell."""
    written = str(info.annotation)
    if written.startswith("dict"):
        return "'{\"name\": 1}'"
    if written.startswith("list[dict"):
        return "'[{\"name\": 1}]'"
    if "float" in written or "int" in written:
        return "'[1, 2]'"
    choices = [choice for kind in get_args(info.annotation) if get_origin(kind) is Literal for choice in get_args(kind)]
    return f"'{json.dumps(choices[:1] or ['name'])}'"
