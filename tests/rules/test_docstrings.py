"""The check of docstrings, which `make lint` runs, finds what does not say what a function does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lint.docstrings import fragments_in, main


def in_file(folder: Path, docstring: str, before: str = "") -> Path:
    path = folder / "module.py"
    path.write_text(f'class Thing:\n    {before}\n    def act(self):\n        """{docstring}"""\n')
    return path


@pytest.mark.parametrize(
    "docstring",
    [
        "Of the calls that have failed by now.",
        "Whether all of them fit.",
        "What a policy says.",
        "The board after one move.",
        "ValueError unless it fits.",
        "`values`: of each sample.",
        "[N], one for each token.",
        "float32 [C,K].",
        "Return.",
    ],
)
def test_a_docstring_that_begins_with_no_verb_or_says_nothing_is_named_with_its_line(tmp_path, docstring, capsys):
    path = in_file(tmp_path, docstring)
    assert [(line, name) for line, name, _ in fragments_in(path)] == [(3, "act")]
    assert main([str(path)]) == 1
    printed = capsys.readouterr().out
    assert f"{path}:3: act: {docstring}" in printed and "begin with a verb" in printed


@pytest.mark.parametrize("docstring", ["Return the calls that have failed.", "Tell whether all fit."])
def test_a_docstring_that_says_what_the_function_does_passes(tmp_path, docstring):
    path = in_file(tmp_path, docstring)
    assert list(fragments_in(path)) == [] and main([str(path)]) == 0


def test_a_property_may_be_named_by_a_noun(tmp_path):
    assert list(fragments_in(in_file(tmp_path, "The board's width.", before="@property"))) == []
    assert list(fragments_in(in_file(tmp_path, "Whether it is solved.", before="@property"))) != []
