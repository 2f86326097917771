"""Read the tool call in a model's answer: the last <tool_call>{…}</tool_call>, strict JSON."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

MAX_CHARS = 20_000
_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]


def parse_tool_call(text: str) -> ToolCall | None:
    """The last call in `text`; None where there is none or it is not of the right form.

    The name stands at `name` or `function.name`, the arguments at `arguments` or `function.arguments`; arguments may
    also be a string that holds a JSON object.
    """
    found = _CALL.findall(text[-MAX_CHARS:])
    payload = _loads(found[-1]) if found else None
    function = payload.get("function", {}) if isinstance(payload, dict) else None
    if not isinstance(payload, dict) or not isinstance(function, dict):
        return None
    name = payload.get("name") or function.get("name")
    arguments = payload.get("arguments", function.get("arguments"))
    if arguments is None:
        arguments = {}
    elif isinstance(arguments, str):
        arguments = _loads(arguments)
    if not isinstance(name, str) or not name.strip() or not isinstance(arguments, dict):
        return None
    return ToolCall(name.strip(), arguments)


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
