"""Tools of an MCP server, a real one in a process of its own: make test-mcp."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from envs.loader import load_module, tool_schemas
from envs.tools.mcp_tools import mcp_tools
from envs.tools.tool import FAILED, ToolBox, ToolContext, ToolFault, ToolResult
from envs.tools.tool_call import ToolCall

pytest.importorskip("mcp", reason="make test-mcp installs it")
pytestmark = pytest.mark.slow
SERVER = '''
import io, os, time
from PIL import Image as Picture
from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("test")

@server.tool()
def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b

@server.tool()
def draw(size: int) -> Image:
    """Draw."""
    buffer = io.BytesIO()
    Picture.new("RGB", (size, size), "red").save(buffer, "PNG")
    return Image(data=buffer.getvalue(), format="png")

@server.tool()
def fail() -> str:
    """Fail."""
    raise ToolError("boom")

@server.tool()
def wait(seconds: float) -> str:
    """Wait."""
    time.sleep(seconds)
    return "done"

@server.tool()
def pid() -> str:
    """Tell."""
    return str(os.getpid())

server.run("stdio")
'''


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    path = tmp_path_factory.mktemp("mcp") / "server.py"
    path.write_text(SERVER)
    # The command gets PATH and HOME alone.
    yield ["env", f"PYTHONPATH={os.environ.get('PYTHONPATH', '')}", sys.executable, str(path)]


def run(command: list[str], name: str, timeout_s: float = 30.0, **arguments: object) -> ToolResult:
    return ToolBox(mcp_tools(command, timeout_s=timeout_s)).run(ToolCall(name, arguments), ToolContext())


def test_a_servers_tools_have_their_schemas(command: list[str]) -> None:
    (add,) = mcp_tools(command, only=["add"])
    assert (add.name, add.description) == ("add", "Add two numbers.")
    assert add.parameters["required"] == ["a"] and add.parameters["properties"]["b"]["type"] == "integer"


def test_results_are_texts_and_images(command: list[str]) -> None:
    assert run(command, "add", a=2, b=3).text == "5"
    assert run(command, "add", a="2").text == "3"  # as written in XML
    (image,) = run(command, "draw", size=8).images
    assert image.size == (8, 8) and image.getpixel((0, 0)) == (255, 0, 0)


def test_what_the_server_refuses_and_what_takes_too_long_is_told(command: list[str]) -> None:
    refused = run(command, "add", b=1)
    assert refused.error == FAILED and "required" in refused.text.lower()
    assert "boom" in run(command, "fail").text
    late = run(command, "wait", timeout_s=0.3, seconds=2)
    assert late.error == FAILED and "no answer within 0.3 s" in late.text
    assert "9000x9000" in run(command, "draw", size=9000).text


def test_a_server_that_is_killed_ends_the_episode_and_is_started_anew(command: list[str]) -> None:
    first = int(run(command, "pid").text)
    os.kill(first, signal.SIGKILL)
    time.sleep(0.2)
    with pytest.raises(ToolFault, match="is gone"):
        run(command, "pid")
    assert int(run(command, "pid").text) != first


def test_a_server_that_cannot_be_started_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "quits.py").write_text("raise SystemExit(3)")
    for command, words in (
        (["/no/such/server"], "does not start: .*No such file"),
        ([sys.executable, str(tmp_path / "quits.py")], "does not start: "),
        ("http://127.0.0.1:9/mcp", "does not start: "),
        ([], "neither a command nor a URL"),
    ):
        with pytest.raises(ValueError, match=words) as refused:
            mcp_tools(command)
        assert "\n" not in str(refused.value)


def test_a_tool_that_the_server_lacks_is_named_with_those_that_it_has(command: list[str], tmp_path: Path) -> None:
    source = f"def tools(args):\n    return mcp_tools({command!r}, args['only'])\n"
    (tmp_path / "with_mcp.py").write_text(f"from envs.tools.mcp_tools import mcp_tools\n{source}")
    module = load_module(str(tmp_path / "with_mcp.py"), "tools")
    assert [schema["function"]["name"] for schema in tool_schemas(module, {"only": ["add", "pid"]})] == ["add", "pid"]
    with pytest.raises(ValueError, match="has no tool 'subtract'; it has: add, draw"):
        tool_schemas(module, {"only": ["subtract"]})
