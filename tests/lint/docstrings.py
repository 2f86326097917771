"""Finds docstrings that do not begin with what the function does: python -m tests.lint.docstrings [PATH ...]

Prints `file:line: name: first line` for each that begins otherwise, and ends with 1 if there is any. Properties and
fixtures may begin with an article.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("actor", "envs", "kernels", "launch", "learner", "shared", "tests/support")
FRAGMENTS = set(
    """
    after alone along also always any as at because before beside between by despite during each either else every
    except for from how if in instead into like most neither never no none not nothing now of on once one only or
    other otherwise out over per several since so some still than their then there those to too two under unless
    unlike until up what whatever when whenever where wherever whether which whichever while who whoever whole whom
    whose why with within without yet
    """.split()  # noqa: SIM905
)
ARTICLES = set("a all an another both his its it many more my our same that the these they this".split())  # noqa: SIM905


def opening(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str | None:
    """Return the first line of a function's docstring, or None where it has none."""
    text = ast.get_docstring(function)
    return text.splitlines()[0] if text else None


def is_property(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Tell whether a decorator makes the function a value."""
    names = {ast.unparse(decorator).split("(")[0].rpartition(".")[2] for decorator in function.decorator_list}
    return bool(names & {"property", "cached_property", "fixture"})


def fragments_in(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield (line, name, first line) of each function of a file whose docstring begins with no verb."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not (line := opening(node)):
            continue
        word = line.split()[0].rstrip(",.:;").lower()
        is_name = not word.isalpha() or word.endswith(("error", "exit"))  # `values`, [N], float32, ValueError
        if is_property(node):
            is_name, word = False, "" if word in ARTICLES else word
        says_nothing = len(line.split()) < 2
        if is_name or says_nothing or word in FRAGMENTS | ARTICLES:
            yield node.lineno, node.name, line


def main(arguments: list[str]) -> int:
    paths = [Path(argument) for argument in arguments] or [Path(package) for package in PACKAGES]
    files = sorted({file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py"))})
    wrong = [f"{file}:{line}: {name}: {text}" for file in files for line, name, text in fragments_in(file)]
    if wrong:
        print("\n".join(wrong))
        print(
            f"error: {len(wrong)} docstrings begin with a fragment: begin with a verb that says what the function does"
        )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
