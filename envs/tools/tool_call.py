r"""Read the tool calls in a model's answer: <tool_call>{…}</tool_call> after its thoughts, the form of Hermes and Qwen.

Besides strict JSON, the forms that models write are read, those of the families in `shared/families` among them: LaTeX
whose backslashes are not doubled, single quotes, a trailing comma, a code fence, a list of calls or several in one
block, a missing tag, other spellings of the tag and of the keys, keys and values without quotes, NAME(KEY=VALUE),
elements and attributes of XML, and Qwen3-Coder's <function=NAME><parameter=KEY>…</parameter></function>.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from envs.math_grading.normalize import without_thoughts
from shared.families.marks import CALL

MAX_CHARS = 20_000  # from a call to the end of the answer
MAX_BLOCKS = 8  # calls that are looked at, from the end
_OPENING, _CLOSING = CALL.opening, CALL.closing
_TAG = r"(?:tool_calls?|function_calls?)"
_ANY_OPENING = re.compile(rf"<\|? ?{_TAG}(?P<attributes>\s[^<>]{{0,300}})?\s?/?\|?>")
_ANY_CLOSING = re.compile(rf"<[/|]{{1,2}} ?{_TAG}\s?\|?>")
_MENTION = re.compile(rf"([`'\"])</?{_TAG}>\1")
_BARE_FUNCTION = re.compile(r"(?:^|\n)\s{0,80}(?=<function=[^>\s]{1,200}>)")
_PROSE = re.compile(r"[A-Za-z]{1,40},? [a-z]{1,40}[ ,.]|[,.;)]")
_QUOTES = str.maketrans("“”„«»‘’", '"""""\'\'')
_NAME = r"[A-Za-z_][\w.]{0,100}"
_NAMES = ("name", "tool", "tool_name", "function_name")
_ARGUMENTS = ("arguments", "parameters", "args", "kwargs", "input", "tool_input")
_NO_ARGUMENTS = ("type", "id", "function", *_NAMES)
_PYTHON = re.compile(rf"\[?\s*({_NAME})\s*\((.*)\)\s*[;.]?\s*\]?", re.DOTALL)
_NAME_AND_JSON = re.compile(rf"(?:{_NAME}\.)?({_NAME})\s*[:,]?\s*(\{{.*\}})", re.DOTALL)
_NAME_AND_KEYS = re.compile(rf"({_NAME})\s*<arg_key>.*", re.DOTALL)
_NAMED_ELEMENT = re.compile(rf"<\w+\s+name\s*=\s*[\"']?({_NAME})[\"']?\s*>(.*)", re.DOTALL)
_NAME_ELEMENT = re.compile(rf"<name>\s*({_NAME})\s*</name>(.*)", re.DOTALL)
_ELEMENT = re.compile(rf"<({_NAME})((?:\s+\w+\s*=\s*(?:\"[^\"]*\"|'[^']*'))*)\s*(?:/>|>(.*))", re.DOTALL)
_ATTRIBUTE = re.compile(r"(\w+)\s*=\s*(?:\"([^\"]*)\"|'([^']*)')")
_FIELDS = (
    re.compile(r"<arg_key>\s*(\w{1,100})\s*</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL),
    re.compile(r"<(?:parameter|param|arg|argument)\s+name\s*=\s*[\"']?(\w{1,100})[\"']?\s*>(.*?)</", re.DOTALL),
    re.compile(r"<(\w{1,100})>([^<]*)</\1>"),
)
_FENCE = re.compile(r"```[a-zA-Z]*")
_FUNCTION = re.compile(r"<function=([^>\s]{1,200})>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]{1,200})>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
# Backslashes that JSON would refuse or read as a control character, although they begin a command of LaTeX. Doubled
# ones and those before a quote stay.
_NEWLINE_OR_LATEX = r"n(?=(?:eq?|u|i|abla|eg|otin|ot|earrow|mid|leq|geq|cong|less|gtr|ewline)(?![a-z]))"
_LATEX = re.compile(rf"\\[\\\"'/]|\\(?={_NEWLINE_OR_LATEX}|[bfrt][a-zA-Z]|[^\"'\\/bfnrtu]|u(?![0-9a-fA-F]{{4}}))")
_TRAILING_COMMA = re.compile(r",(\s*[}\]])")


def _decimal(text: str) -> float | str:
    """Return a number with a decimal point; as it is written, if a float is another."""
    return float(text) if repr(float(text)) == text else text


_DECODER = json.JSONDecoder(parse_float=_decimal, parse_constant=str, strict=False)  # line breaks in strings are read


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class MalformedCall:
    """A call that was begun and cannot be read."""


def parse_tool_call(text: str) -> ToolCall | MalformedCall | None:
    """Return the last call in `text`; None if there is none. Calls in thoughts do not count. The name is at `name` or
    `function.name`, the arguments at `arguments`, `parameters` or in `function`; arguments may also be a string with a
    JSON object."""
    rest = _with_plain_tags(without_thoughts(text))
    openings = [match.start() for match in re.finditer(_OPENING, rest)][-MAX_BLOCKS:]
    calls = [*_calls_in(rest[openings[0] :] if openings else "")]
    return calls[-1] if calls else None


def parse_tool_calls(text: str, most: int) -> list[ToolCall | MalformedCall]:
    """Return the first calls in `text`, at most `most`, in their order, each read as by `parse_tool_call`."""
    return list(islice(_calls_in(_with_plain_tags(without_thoughts(text)), most + MAX_BLOCKS), most))


def _calls_in(text: str, most_blocks: int = MAX_BLOCKS) -> Iterator[ToolCall | MalformedCall]:
    """Yield the calls of a text's first blocks."""
    for _ in range(most_blocks):
        start = text.find(_OPENING)
        if start < 0:
            return
        calls, text = _block_of(text[start + len(_OPENING) :])
        yield from calls


def _with_plain_tags(text: str) -> str:
    """Return the text with each tag of a call in its plain spelling; tags that are only mentioned, in quotes, are taken
    out, and a call with one of its tags gets the other."""
    text = _ANY_CLOSING.sub(_CLOSING, _ANY_OPENING.sub(_plain_opening, _MENTION.sub(" ", text)))
    if _OPENING in text:
        return text
    if function := _BARE_FUNCTION.search(text):
        return f"{text[: function.end()]}{_OPENING}{text[function.end() :]}"
    before, closing, after = text.partition(_CLOSING)
    start = before.find("{")
    return f"{before[:start]}{_OPENING}{before[start:]}{closing}{after}" if closing and start >= 0 else text


def _plain_opening(tag: re.Match[str]) -> str:
    """Return the plain tag; a name and arguments in its attributes follow it."""
    fields = _attributes(tag["attributes"] or "")
    name = fields.pop("name", None)
    if name is None:
        return _OPENING
    return _OPENING + (json.dumps({"name": name, "arguments": fields}) if fields else f"{name} ")


def _block_of(text: str) -> tuple[list[ToolCall | MalformedCall], str]:
    """Return the calls of the block at the start of `text`, and what follows the block; none for a sentence that only
    mentions the tag."""
    if len(text) > MAX_CHARS:
        return [MalformedCall()], text
    values, rest = _decoded(_escaped(text).lstrip())
    if not values or not (rest.startswith(_CLOSING) or not rest):  # a tag inside a JSON string is no closing tag
        block, closing, rest = text.partition(_CLOSING)
        if functions := _FUNCTION.findall(block):
            return [_function_call(name, body) for name, body in functions], rest
        if not closing and _PROSE.match(block.lstrip()):
            return [], text
        values = _values(block)
        if not values or (not block.lstrip().startswith(("{", "[")) and not _call_of(values[-1])):
            return [_loose_call(block.translate(_QUOTES).strip(), is_closed=bool(closing)) or MalformedCall()], rest
    return [_call_of(value) or MalformedCall() for value in values] or [MalformedCall()], rest


def _function_call(name: str, body: str) -> ToolCall | MalformedCall:
    """Return the call of Qwen3-Coder's form."""
    fields = {key: value.strip() for key, value in _PARAMETER.findall(body)}
    return _call_of({"name": name, "arguments": fields or body}) or MalformedCall()


def _escaped(text: str) -> str:
    """Return JSON in which the backslashes of LaTeX commands are doubled."""
    return _LATEX.sub(
        lambda match: match[0] if len(match[0]) == 2 and match[0] != r"\'" else "\\\\" + match[0][1:], text
    )


def _values(block: str) -> list[Any]:
    """Return the objects that a block holds one after the other, those of lists too; [] if there is none."""
    text = _FENCE.sub("", block)
    first = min((position for position in map(text.find, "{[") if position >= 0), default=len(text))
    text = text[first:].strip()
    json_text = _escaped(text)
    without_comma = _TRAILING_COMMA.sub(r"\1", json_text)
    for attempt in (json_text, _escaped(text.translate(_QUOTES)), without_comma, json_text + "}", json_text + "}}"):
        values, _ = _decoded(attempt)
        if values:
            return values
    try:  # single quotes, True and None
        literal = _LATEX.sub(lambda match: match[0] if len(match[0]) == 2 else "\\\\", text)
        values = ast.literal_eval("[" + re.sub(r"}\s*{(?=\s*['\"])", "},{", literal) + "]")
    except Exception:  # noqa: BLE001 - whatever is wrong with it, it is no literal
        return []
    return _flat(values)


def _decoded(text: str) -> tuple[list[Any], str]:
    """Return the objects at the start of a JSON text, those of lists too, and what follows them."""
    values: list[Any] = []
    while text[:1] in ("{", "["):
        try:
            value, end = _DECODER.raw_decode(text)
        except (ValueError, RecursionError):
            break
        values.append(value)
        text = text[end:].lstrip(" \t\r\n,;")
    return _flat(values), text


def _flat(values: list[Any]) -> list[Any]:
    return [item for value in values for item in (value if isinstance(value, list) else [value])]


def _call_of(payload: Any) -> ToolCall | None:
    function = payload.get("function", {}) if isinstance(payload, dict) else None
    if not isinstance(payload, dict) or not isinstance(function, dict):
        return None
    key, value = next(iter(payload.items()), ("", None))
    if len(payload) == 1 and isinstance(value, dict) and key not in (*_ARGUMENTS, "function"):
        payload = {"name": key, "arguments": value}
    name = next((part[key] for part in (payload, function) for key in _NAMES if part.get(key)), None)
    fields = [part[key] for part in (payload, function) for key in _ARGUMENTS if key in part]
    others = {key: value for key, value in payload.items() if key not in _NO_ARGUMENTS}
    arguments: Any = next((field for field in fields if field is not None), {} if fields else others)
    if isinstance(arguments, str):
        values = _values(arguments)
        arguments = values[0] if len(values) == 1 and arguments.strip().startswith("{") else None
    if not isinstance(name, str) or not name.strip() or not isinstance(arguments, dict):
        return None
    return ToolCall(name.strip().removeprefix("functions."), arguments)


def _loose_call(block: str, *, is_closed: bool) -> ToolCall | None:
    """Return the call of a block that is no JSON; None if it cannot be read."""
    name: str | None
    arguments: Any = None
    if is_closed and re.fullmatch(_NAME, block):  # as GLM writes a call without arguments
        return _call_of({"name": block, "arguments": {}})
    if match := _PYTHON.fullmatch(block):
        name, arguments = match[1], _python_arguments(match[2].strip())
    elif (match := _NAME_AND_JSON.fullmatch(block)) or (match := _NAME_ELEMENT.fullmatch(block)):
        start = match[2].find("{")
        values = _values(match[2]) if start >= 0 else [dict(_fields(match[2]))]
        name, arguments = match[1], values[-1] if values else None
    elif (match := _NAME_AND_KEYS.fullmatch(block)) or (match := _NAMED_ELEMENT.fullmatch(block)):
        name, arguments = match[1], _fields(match[0])
    elif match := _ELEMENT.fullmatch(block):
        name, arguments = match[1], _attributes(match[2]) | _fields(match[3] or "")
    else:
        name, arguments = _unquoted(block, is_closed=is_closed)
    return _call_of({"name": name, "arguments": arguments}) if arguments else None


def _attributes(text: str) -> dict[str, str]:
    return {key: double or single for key, double, single in _ATTRIBUTE.findall(text)}


def _fields(text: str) -> dict[str, str]:
    """Return the arguments that stand in elements of XML."""
    pairs = next(filter(None, (pattern.findall(text) for pattern in _FIELDS)), [])
    return {key: value.strip() for key, value in pairs}


def _python_arguments(text: str) -> Any:
    """Return the arguments of a call such as calc_score(answer="60"); one without a name is the answer."""
    if text.startswith("{"):
        return next(iter(_values(text)), None)
    parts = [part.partition("=") for part in re.split(r",\s*(?=[A-Za-z_]\w*\s*=)", text)]
    if all(re.fullmatch(r"[A-Za-z_]\w*\s*", key) and equals for key, equals, _ in parts):
        return {key.strip(): _unescaped(value.strip()) for key, _, value in parts}
    return {"answer": _unescaped(text)} if text else None


def _unescaped(text: str) -> str:
    """Return a text without the quotes around it."""
    is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
    return text[1:-1].replace("\\\\", "\\") if is_quoted else text


def _unquoted(block: str, *, is_closed: bool) -> tuple[str | None, dict[str, str] | None]:
    """Return the name and the answer of JSON or YAML whose keys or values have no quotes, or which has comments."""
    text = block.replace("\\{", "{").replace("\\}", "}") if '\\{"' in block or block.startswith("\\{") else block
    name = re.search(rf"\b(?:name|tool)[\"']?\s*[:=]\s*[\"']?({_NAME})", text)
    answer = re.search(r"\b[Aa]nswer[\"']?\s*[:=]\s*(\S.*)", text, re.DOTALL)
    if not name or not answer:
        return None, None
    value = re.split(r",\s*[\"']?\w+[\"']?\s*:", answer[1])[0].rstrip(" \n`")
    while value.endswith((",", ";", "]")) or (value.endswith("}") and value.count("}") > value.count("{")):
        value = value[:-1].rstrip()
    is_quoted = value[:1] in ("'", '"') and value[-1] == value[0] and value.count(value[0]) == 2
    if not is_quoted and ('"' in value or "\n" in value or not is_closed):
        return None, None
    return name[1], {"answer": _unescaped(value)}
