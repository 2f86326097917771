"""Tools that a model may call: what the chat template tells of each, and one call with its result.

A tool is a Python function with type hints and a docstring:

    def look_up(word: str, lines: int = 3) -> str:
        \"\"\"Look up a word in the dictionary.

        Args:
            word: the word, in its base form
            lines: how many lines to return
        \"\"\"

Its result is shown to the model: a text, an image, a list of both, or any value that JSON can hold. A parameter of the
type `ToolContext` is not the model's to give: it gets the episode's.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from envs.tools.tool_call import MalformedCall, ToolCall
from shared.families.marks import CALL
from shared.rgb_images import open_image, to_rgb
from shared.types import Sample
from shared.util.user_errors import TracebackLog, in_words, text_of

MAX_RESULT_CHARACTERS = 8000  # of one result; the rest is left out, and the model is told
MAX_RESULT_IMAGES = 4
MAX_RESULT_PIXELS = 4_194_304  # of one image
MAX_ERROR_CHARACTERS = 500
FORM = CALL.around('\n{"name": <function-name>, "arguments": <args-json-object>}\n')
UNKNOWN, MALFORMED, BAD_ARGUMENTS, FAILED = "unknown_tool", "malformed_call", "bad_arguments", "failed"
ERRORS = (UNKNOWN, MALFORMED, BAD_ARGUMENTS, FAILED)
"""The kinds of results that are errors; each is a metric."""
_NAME = re.compile(r"[A-Za-z_][\w-]{0,63}")
_DESCRIBED = re.compile(r"\s*(?::param )?\*{0,2}(\w+)(?:\s*\([^)]*\))?\s*:\s*(.*)")
_SECTION = re.compile(r"\s*(args|arguments|parameters|returns?|raises|yields|examples?|notes?)\s*:\s*", re.IGNORECASE)
_tracebacks = TracebackLog(logging.getLogger("actor"))


class ToolFault(Exception):
    """Raised by a tool that cannot work, whatever the model asks, such as one whose server is gone. It ends the episode
    as env_error; any other exception is told to the model."""


class BadArguments(ValueError):
    """The arguments of a call do not fit the tool's schema; the message is told to the model."""


@dataclass(slots=True)
class ToolContext:
    """What a tool may know of its episode. `images` are the pictures that the model has seen, in their order: the
    sample's, those of the first observation, and those of earlier results. `state` is the tools' own, and empty at the
    start of an episode."""

    sample: Sample | None = None
    images: list[Image.Image] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What the model is told of a call. `error` is one of `ERRORS`, or empty; `value` is what the tool returned."""

    text: str = ""
    images: tuple[Image.Image, ...] = ()
    error: str = ""
    value: Any = None


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool. `parameters` is the JSON schema of its arguments; `run` gets the arguments and the episode's context,
    and raises `BadArguments` for ones that do not fit."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    run: Callable[[dict[str, Any], ToolContext], Any]

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"tool {self.name!r}: a name has letters, digits, _ and -, at most 64")

    @property
    def schema(self) -> dict[str, Any]:
        """The tool in the form of OpenAI, which chat templates read."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


ToolSource = Tool | Callable[..., Any]


def tools_of(sources: Iterable[ToolSource]) -> tuple[Tool, ...]:
    """Return the tools of functions; a `Tool` is one already. Raise ValueError, in one line, for a function of which a
    model could not be told, and for two tools of one name."""
    tools = tuple(source if isinstance(source, Tool) else tool_of(source) for source in sources)
    names = [tool.name for tool in tools]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"two tools have the name {twice!r}: rename one")
    return tools


def tool_of(function: Callable[..., Any], name: str = "") -> Tool:
    """Return the tool of a function. Raise ValueError for one without a docstring, or with a parameter without a type
    hint or of a type that has no JSON schema."""
    name = name or getattr(function, "__name__", "")
    if not name or not callable(function):
        raise ValueError(f"a tool is {in_words(function)}, not a function")
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"tool {name} is an async function: make it a plain one (each episode has a thread)")
    description, described = _read_docstring(inspect.getdoc(function) or "")
    if not description:
        raise ValueError(f"tool {name} has no docstring: say in one what it does, for the model reads it")
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except Exception as error:
        raise ValueError(f"tool {name}: its type hints cannot be read: {text_of(error)}") from error
    fields: dict[str, Any] = {}
    context = ""
    for parameter in inspect.signature(function).parameters.values():
        hint = hints.get(parameter.name)
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ValueError(f"tool {name}: its parameter {parameter} cannot be given by name: name each one")
        if hint is None:
            raise ValueError(
                f"tool {name}: its parameter {parameter.name!r} has no type hint: write {parameter.name}: …"
            )
        if hint is ToolContext:
            context = parameter.name
            continue
        default = ... if parameter.default is parameter.empty else parameter.default
        said = described.get(parameter.name)
        fields[parameter.name] = (hint, Field(default, description=said) if said else default)
    config = ConfigDict(extra="forbid", coerce_numbers_to_str=True, arbitrary_types_allowed=False)
    try:
        arguments = create_model(f"{name}_arguments", __config__=config, **fields)
        parameters = _plain_schema(arguments.model_json_schema())
    except Exception as error:
        raise ValueError(f"tool {name}: a parameter has a type that JSON has no form for: {text_of(error)}") from error
    return Tool(name, description, parameters, partial(_run_function, function, arguments, context))


def _run_function(
    function: Callable[..., Any], kind: type[BaseModel], context_name: str, given: dict[str, Any], context: ToolContext
) -> Any:
    read = _read_arguments(kind, given)
    values = {name: getattr(read, name) for name in kind.model_fields}
    return function(**values, **({context_name: context} if context_name else {}))


def _read_arguments(kind: type[BaseModel], given: Mapping[str, Any]) -> BaseModel:
    """Return the arguments of a call. A text that is not of its parameter's type, as in calls that are written in XML,
    is read as JSON. Raise BadArguments, in the words of the schema."""
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        texts = {str(each["loc"][0]) for each in error.errors() if each["loc"]}
        read = {name: from_json(value) if name in texts else value for name, value in given.items()}
        first = error
    try:
        return kind.model_validate(read)
    except ValidationError:
        raise BadArguments(_mistakes(first, kind)) from None


def from_json(value: Any) -> Any:
    """Return what a text spells in JSON; a text that is none, and any other value, unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _mistakes(error: ValidationError, kind: type[BaseModel]) -> str:
    """Return what is wrong with arguments: of each parameter once, with what the schema says of it."""
    words: dict[str, str] = {}
    for each in error.errors():
        name = str(each["loc"][0]) if each["loc"] else ""
        if name in words:
            continue
        known = kind.model_fields.get(name)
        if known is None:
            has = ", ".join(kind.model_fields) or "no arguments"
            words[name] = f"there is no argument {name!r}, it takes {has}"
            continue
        schema = _plain_schema(kind.model_json_schema())["properties"].get(name, {})
        said = f" ({known.description})" if known.description else ""
        problem = "is missing" if each["type"] == "missing" else f"is {in_words(each['input'])}: {each['msg'].lower()}"
        words[name] = f"{name!r} {problem}; it is to be {_type_in_words(schema)}{said}"
    return "; ".join(words.values())


def _type_in_words(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return "one of " + ", ".join(map(json.dumps, schema["enum"]))
    if "anyOf" in schema:
        return " or ".join(_type_in_words(each) for each in schema["anyOf"])
    kind = str(schema.get("type", "a value of its schema"))
    return f"array of {_type_in_words(schema['items'])}" if kind == "array" and schema.get("items") else kind


def _plain_schema(schema: Any) -> Any:
    """Return a JSON schema without the titles that pydantic gives to everything."""
    if isinstance(schema, list):
        return [*map(_plain_schema, schema)]
    if not isinstance(schema, dict):
        return schema
    plain = {}
    for key, value in schema.items():
        if key == "properties":  # names of the user's, of which one may be title
            plain[key] = {name: _plain_schema(each) for name, each in value.items()}
        elif key not in ("title", "additionalProperties"):
            plain[key] = _plain_schema(value)
    return plain


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return what a docstring says before its sections, in one line, and what it says of each parameter: in a section
    Args, or after `:param name:`."""
    description: list[str] = []
    said: dict[str, str] = {}
    section, last, indent = "", "", 0
    for line in text.splitlines():
        if header := _SECTION.fullmatch(line):
            section, last = header[1].lower(), ""
            continue
        is_of_parameters = section in ("args", "arguments", "parameters") or line.lstrip().startswith(":param ")
        depth = len(line) - len(line.lstrip())
        if is_of_parameters and (match := _DESCRIBED.fullmatch(line)) and (not last or depth <= indent):
            last, indent = match[1], depth
            said[last] = match[2].strip()
        elif last and line.strip() and depth > indent:
            said[last] += " " + line.strip()
        elif not section and not line.lstrip().startswith(":"):
            description.append(line.strip())
    return " ".join(" ".join(description).split()), said


class ToolBox:
    """The tools of one environment."""

    def __init__(self, sources: Iterable[ToolSource]) -> None:
        """Raise ValueError as `tools_of` does."""
        self.tools = {tool.name: tool for tool in tools_of(sources)}

    def run(self, call: ToolCall | MalformedCall, context: ToolContext) -> ToolResult:
        """Return what the model is told of its call. Whatever is wrong with the call, or raised by the tool, is told as
        text; only `ToolFault` is raised."""
        if isinstance(call, MalformedCall):
            return _failure(MALFORMED, f"the call cannot be read; its form is {FORM}")
        tool = self.tools.get(call.name)
        if tool is None:
            has = ", ".join(self.tools) or "none"
            return _failure(UNKNOWN, f"there is no tool {in_words(call.name)}; there are: {has}")
        try:
            return result_of(tool.run(call.arguments, context))
        except BadArguments as error:
            return _failure(BAD_ARGUMENTS, f"the arguments of {tool.name}: {error}")
        except ToolFault:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a tool raises is told to the model
            _tracebacks.add(f"the tool {tool.name}", error)
            return _failure(FAILED, f"{tool.name} failed: {type(error).__name__}: {text_of(error)}")


def _failure(kind: str, text: str) -> ToolResult:
    return ToolResult(f"Error: {bounded(text, MAX_ERROR_CHARACTERS)}", error=kind)


def result_of(value: Any) -> ToolResult:
    """Return what a tool returned as a result, within its limits. Raise TypeError for a value without a form that a
    model can be shown."""
    if isinstance(value, ToolResult):
        return ToolResult(bounded(value.text, MAX_RESULT_CHARACTERS), _shown(value.images), value.error, value.value)
    parts = list(value) if isinstance(value, (list, tuple)) else [value]
    images = [part for part in parts if isinstance(part, Image.Image)]
    if images or (parts and all(isinstance(part, str) for part in parts)):
        texts = [_in_text(part) for part in parts if not isinstance(part, Image.Image)]
        text = "\n".join(texts)
    else:
        text = _in_text(value)
    return ToolResult(bounded(text, MAX_RESULT_CHARACTERS), _shown(images), value=value)


def _in_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise TypeError(f"its result is {in_words(value)}, not a text, an image, or a value of JSON: {error}") from None


def _shown(images: Sequence[Image.Image]) -> tuple[Image.Image, ...]:
    if len(images) > MAX_RESULT_IMAGES:
        raise ValueError(f"its result has {len(images)} images, more than {MAX_RESULT_IMAGES}")
    for image in images:
        if not 0 < image.width * image.height <= MAX_RESULT_PIXELS:
            raise ValueError(f"its result has an image of {image.width}x{image.height}")
    return tuple(images)


def bounded(text: str, most: int) -> str:
    """Return a text of at most `most` characters, and a word about what is left out."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text) - most} more characters are left out)"


def images_of_sample(sample: Sample | None) -> list[Image.Image]:
    """Return the images of a sample's prompt, decoded."""
    return [to_rgb(open_image(image.data)) for image in getattr(sample, "images", None) or ()]


def tools_in_words(sources: Iterable[ToolSource]) -> str:
    """Return the tools as a text for a system prompt, in the words of Qwen's templates: for a model whose chat template
    leaves out tools."""
    schemas = "\n".join(json.dumps(tool.schema, ensure_ascii=False) for tool in tools_of(sources))
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        f"You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{schemas}\n</tools>\n\n"
        f"For each function call, return a json object with function name and arguments within {CALL.around('')} "
        f"XML tags:\n{FORM}"
    )
