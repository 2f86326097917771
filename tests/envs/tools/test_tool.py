"""Tools of functions: what the model is told of them, and what it is told of a call."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from PIL import Image
from pydantic import Field

from envs.loader import load_module, tool_schemas
from envs.tools.mcp_tools import mcp_tools
from envs.tools.tool import (
    BAD_ARGUMENTS,
    FAILED,
    MAX_RESULT_CHARACTERS,
    UNKNOWN,
    ToolBox,
    ToolContext,
    ToolFault,
    tool_of,
    tools_in_words,
    tools_of,
)
from envs.tools.tool_call import MalformedCall, ToolCall, parse_tool_calls


def look_up(
    word: str,
    lines: int = 3,
    language: Literal["en", "fr"] = "en",
    marks: Annotated[list[float] | None, Field(description="where to look")] = None,
) -> str:
    """Look up a word
    in the dictionary.

    Args:
        word (str): the word,
            in its base form
        lines: how many lines to return

    Returns:
        the lines
    """
    return f"{word}:{lines}:{language}:{marks}"


def run(function: Any, **arguments: Any) -> Any:
    return ToolBox([function]).run(ToolCall(function.__name__, arguments), ToolContext())


def test_a_functions_hints_and_docstring_are_its_schema() -> None:
    assert tool_of(look_up).schema == {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look up a word in the dictionary.",
            "parameters": {
                "type": "object",
                "properties": {
                    "word": {"type": "string", "description": "the word, in its base form"},
                    "lines": {"type": "integer", "default": 3, "description": "how many lines to return"},
                    "language": {"type": "string", "enum": ["en", "fr"], "default": "en"},
                    "marks": {
                        "anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "null"}],
                        "default": None,
                        "description": "where to look",
                    },
                },
                "required": ["word"],
            },
        },
    }


def test_the_words_of_sphinx_are_read_too() -> None:
    def weigh(kilograms: float) -> float:
        """Weigh.

        :param kilograms: how many
        """
        return kilograms

    assert tool_of(weigh).parameters["properties"]["kilograms"]["description"] == "how many"
    assert tool_of(weigh).description == "Weigh."


def test_a_tool_without_a_hint_or_a_docstring_is_refused_in_one_line(tmp_path: Path) -> None:
    cases = {
        'def look(x):\n    """Look."""\n': "tool look: its parameter 'x' has no type hint",
        "def look(x: int):\n    pass\n": "tool look has no docstring",
        'def look(*x: int):\n    """Look."""\n': "cannot be given by name",
        'async def look(x: int):\n    """Look."""\n': "is an async function",
        'def look(x: object):\n    """Look."""\n': "",
        'def look(x: "Missing"):\n    """Look."""\n': "its type hints cannot be read",
        'class Odd:\n    pass\ndef look(x: Odd):\n    """Look."""\n': "a type that JSON has no form for",
        "look = 3\n": "a tool is 3, not a function",
    }
    for number, (source, words) in enumerate(cases.items()):
        path = tmp_path / f"odd{number}.py"
        path.write_text(source + "TOOLS = [look]\n")
        module = load_module(str(path), "TOOLS")
        if not words:
            assert tool_schemas(module, {})
            continue
        with pytest.raises(ValueError, match=words) as refused:
            tool_schemas(module, {})
        assert "\n" not in str(refused.value) and path.name in str(refused.value)


def test_a_module_tells_its_tools_by_its_settings_or_has_none(tmp_path: Path) -> None:
    source = 'def look(x: int):\n    """Look."""\ndef tools(args):\n    return [look] if args["on"] else []\n'
    (tmp_path / "by_args.py").write_text(source)
    module = load_module(str(tmp_path / "by_args.py"), "tools")
    assert [schema["function"]["name"] for schema in tool_schemas(module, {"on": True})] == ["look"]
    assert tool_schemas(module, {"on": False}) == ()
    with pytest.raises(ValueError, match=r"tools\(args\) of .*by_args.py raised KeyError"):
        tool_schemas(module, {})
    assert tool_schemas(load_module("envs.colour"), {}) == ()


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two tools have the name 'look_up'"):
        tools_of([look_up, tool_of(look_up)])


def test_arguments_become_what_the_hints_say() -> None:
    assert run(look_up, word=60, lines="2").text == "60:2:en:None"
    assert run(look_up, word="x", marks="[1, 2.5]").text == "x:3:en:[1.0, 2.5]"  # as written in XML


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "'word' is missing; it is to be string (the word, in its base form)"),
        ({"word": "x", "lines": "many"}, "'lines' is 'many': input should be a valid integer"),
        ({"word": "x", "language": "de"}, 'it is to be one of "en", "fr"'),
        ({"word": "x", "marks": [1, "a"]}, "it is to be array of number or null (where to look)"),
        ({"word": "x", "page": 1}, "there is no argument 'page', it takes word, lines, language, marks"),
    ],
)
def test_bad_arguments_are_told_in_the_words_of_the_schema(arguments: dict[str, Any], words: str) -> None:
    result = run(look_up, **arguments)
    assert result.error == BAD_ARGUMENTS
    assert words in result.text and result.text.startswith("Error: the arguments of look_up: ")


def test_an_unknown_tool_and_a_call_that_cannot_be_read_are_told() -> None:
    box = ToolBox([look_up])
    unknown = box.run(ToolCall("search", {}), ToolContext())
    assert (unknown.error, unknown.text) == (UNKNOWN, "Error: there is no tool 'search'; there are: look_up")
    assert "<tool_call>" in box.run(MalformedCall(), ToolContext()).text


def test_an_exception_of_a_tool_is_told_and_a_fault_is_raised() -> None:
    def divide(by: int) -> float:
        """Divide."""
        if by < 0:
            raise ToolFault("the server is gone")
        return 1 / by

    result = run(divide, by=0)
    assert (result.error, result.text) == (FAILED, "Error: divide failed: ZeroDivisionError: division by zero")
    with pytest.raises(ToolFault):
        run(divide, by=-1)


def test_a_tool_gets_the_episodes_context_and_the_model_is_not_told_of_it() -> None:
    def count(step: int, episode: ToolContext) -> int:
        """Count."""
        episode.state["n"] = episode.state.get("n", 0) + step
        return episode.state["n"]

    box, context = ToolBox([count]), ToolContext()
    assert list(box.tools["count"].parameters["properties"]) == ["step"]
    assert [box.run(ToolCall("count", {"step": 2}), context).text for _ in range(2)] == ["2", "4"]


def test_what_a_tool_returns_becomes_texts_and_images_within_limits() -> None:
    picture = Image.new("RGB", (4, 4))

    def give(what: str) -> Any:
        """Give."""
        values: dict[str, Any] = {
            "text": "a", "json": {"a": [1, None]}, "image": picture, "both": ["see", picture], "texts": ["a", "b"],
            "long": "x" * (MAX_RESULT_CHARACTERS + 7), "many": [picture] * 5, "huge": Image.new("L", (5000, 1000)),
            "odd": object(), "nothing": None,
        }  # fmt: skip
        return values[what]

    def result(what: str) -> tuple[str, int]:
        made = run(give, what=what)
        return made.text, len(made.images)

    assert result("text") == ("a", 0)
    assert result("json") == ('{"a": [1, null]}', 0)
    assert result("image") == ("", 1)
    assert result("both") == ("see", 1)
    assert result("texts") == ("a\nb", 0)
    assert result("nothing") == ("null", 0)
    assert result("long")[0].endswith("… (7 more characters are left out)")
    assert "has 5 images, more than 4" in result("many")[0]
    assert "an image of 5000x1000" in result("huge")[0]
    assert "not a text, an image, or a value of JSON" in result("odd")[0]


def test_several_calls_of_an_answer_are_read_in_their_order() -> None:
    hermes = '<tool_call>\n{"name": "a", "arguments": {"x": 1}}\n</tool_call>'
    coder = "<tool_call>\n<function=b>\n<parameter=x>\n2\n</parameter>\n</function>\n</tool_call>"
    listed = '<tool_call>[{"name": "c", "arguments": {}}, {"name": "d", "arguments": {}}]</tool_call>'
    text = f"<think>{hermes}</think>I look. {hermes}\n{coder} {listed}<tool_call>{{broken</tool_call>"
    calls = parse_tool_calls(text, 9)
    assert [call.name if isinstance(call, ToolCall) else None for call in calls] == ["a", "b", "c", "d", None]
    assert [call.arguments for call in calls[:2] if isinstance(call, ToolCall)] == [{"x": 1}, {"x": "2"}]
    assert parse_tool_calls(text, 2) == calls[:2]
    assert parse_tool_calls("I do not write `<tool_call>` here.", 9) == []


def test_tools_in_words_say_their_schemas_and_the_form_of_a_call() -> None:
    words = tools_in_words([look_up])
    assert '"name": "look_up"' in words and "<tool_call>" in words


def test_tools_of_a_server_without_the_package_say_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(
        ValueError, match=r"does not start: the package mcp is not installed: pip install .* --group mcp"
    ):
        mcp_tools(["server"])
