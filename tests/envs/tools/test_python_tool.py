"""The tool that runs a program: its result, its limits, and what it cannot reach."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from envs.tools.python_tool import python_tool, workers
from envs.tools.tool import FAILED, MAX_RESULT_CHARACTERS, ToolBox, ToolContext, ToolResult
from envs.tools.tool_call import ToolCall

pytestmark = pytest.mark.slow
BOX = ToolBox([python_tool(limit_s=2.0, memory_mb=300)])


@pytest.fixture(scope="module", autouse=True)
def ended_workers() -> Iterator[None]:
    yield
    workers().close()


def run(code: str) -> ToolResult:
    return BOX.run(ToolCall("python", {"code": code}), ToolContext())


def test_a_program_returns_what_it_prints_and_its_last_value() -> None:
    assert run("x = 6\nprint('six')\nx * 7").text == "six\n42"
    assert run("import math\nprint(math.comb(5, 2))").text == "10"
    assert run("x = 1").text == "(the program printed nothing)"


def test_an_exception_of_a_program_is_its_result() -> None:
    result = run("def half(x):\n    return x / 0\nhalf(1)")
    assert result.error == "" and result.text.endswith("ZeroDivisionError: division by zero")
    assert 'File "program", line 2, in half' in result.text and "python_runner" not in result.text
    assert "SyntaxError" in run("def (").text


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("print('begun')\nwhile True: pass", "begun\nError: the program was ended: it did not end within 2 s"),
        ("import time; time.sleep(60)", "did not end within 2 s"),
        ("x = bytearray(2**30)", "more than 300 MiB"),
        ("x = []\nwhile True: x.append(bytearray(2**20))", "more than 300 MiB"),
    ],
)  # fmt: skip
def test_a_program_beyond_its_limits_is_ended_and_the_model_is_told(code: str, words: str) -> None:
    result = run(code)
    assert result.error == FAILED and words in result.text
    assert run("1 + 1").text == "2"


def test_the_output_is_bounded() -> None:
    text = run("while True: print('x' * 1000)").text
    assert len(text) < MAX_RESULT_CHARACTERS + 100 and "more characters are left out" in text


def test_a_program_begins_without_files_variables_or_modules_of_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    run("import math, os\nmath.pi = 3\nos.environ['LEFT'] = '1'\nopen('left.txt', 'w').write('x')")
    assert run("import math, os\nprint(math.pi > 3.1, os.listdir('.'), dict(os.environ))").text == "True [] {}"


def test_a_program_cannot_answer_for_its_worker() -> None:
    write = "    try: os.write(number, b'{}\\n')\n    except OSError: pass\n"
    assert run(f"import os\nfor number in range(3, 64):\n{write}print('tried')").text == "tried"
    assert run("2").text == "2"


def test_what_a_program_has_started_is_ended_with_it(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    code = f"import os, time\npid = os.fork()\nif pid == 0: time.sleep(60)\nopen({str(mark)!r}, 'w').write(str(pid))"
    run(code)
    pid = int(mark.read_text())
    for _ in range(200):
        if not Path(f"/proc/{pid}").exists() or "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text():
            return
        time.sleep(0.05)
    os.kill(pid, 9)
    raise AssertionError("a child of the program goes on")


def test_programs_of_several_episodes_run_at_once() -> None:
    with ThreadPoolExecutor(8) as threads:
        assert [result.text for result in threads.map(run, [str(number) for number in range(16)])] == [
            str(number) for number in range(16)
        ]
