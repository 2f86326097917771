"""Tests what .ci/resolve.py reads: pip's words, pip's configuration, and files of constraints."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from pathlib import Path

import pytest

SCRIPT = Path(".ci/resolve.py")
CONFLICT = """Collecting torch>=2.11
INFO: pip is looking at multiple versions of torch to determine which version is compatible

The conflict is caused by:
    The user requested triton>=3.6
    The user requested triton>=3.6
    torch 2.13.0 depends on triton==3.7.1
    The user requested (constraint) triton==3.9.0

Additionally, some packages in these conflicts have no matching distributions available for your environment:
    triton

To fix this you could try to:
1. loosen the range of package versions you've specified
"""
CONFIGURED = """\
:env:.cert='/etc/certs.pem'
:env:.find-links='/opt/wheels'
global.constraint='/etc/pip/constraints.txt'
global.extra-index-url='https://other.example/simple'
global.index-url='https://first.example/simple'
global.trusted-host='\\na.example\\nb.example'
install.index-url='https://second.example/simple'
"""


@pytest.fixture(scope="module")
def resolve():
    spec = importlib.util.spec_from_file_location("resolve", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_conflict_is_one_line_of_what_pip_says(resolve):
    line = resolve.conflict(CONFLICT, "ERROR: Cannot install torch\nERROR: ResolutionImpossible: see https://...\n")
    assert line == (
        "The user requested triton>=3.6; torch 2.13.0 depends on triton==3.7.1; "
        "The user requested (constraint) triton==3.9.0; the index has none that fits of triton"
    )
    assert resolve.conflict(CONFLICT, "WARNING: Retrying after connection broken\n").endswith(
        "did not answer every time"
    )


@pytest.mark.parametrize(
    ("stderr", "line"),
    [
        ("WARNING: slow\nERROR: No match for torch==99\n", "No match for torch==99"),
        ("no such option: --group\n", "no such option: --group"),
        ("", "pip failed without a word"),
    ],
)
def test_what_is_no_conflict_is_the_last_of_what_pip_says(resolve, stderr, line):
    assert resolve.conflict("Collecting torch\n", stderr) == line


def test_of_pips_configuration_only_the_way_to_the_index_counts(resolve):
    assert resolve.settings(CONFIGURED) == {
        "cert": "/etc/certs.pem",
        "index-url": "https://second.example/simple",
        "trusted-host": "a.example b.example",
    }


def test_pip_is_given_no_other_configuration(resolve, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", "/opt/wheels")
    monkeypatch.setenv("PIP_CONSTRAINT", "/opt/constraints.txt")
    monkeypatch.setenv("PIP_INDEX_URL", "https://index.example/simple")
    monkeypatch.setattr(resolve, "PIP", (sys.executable, "-m", "pip"))
    environ = resolve.way_to_the_index()
    assert {"PIP_FIND_LINKS", "PIP_CONSTRAINT", "PIP_EXTRA_INDEX_URL"}.isdisjoint(environ)
    assert environ["PIP_INDEX_URL"] == "https://index.example/simple"
    assert environ["PIP_CONFIG_FILE"] == "/dev/null"


def test_what_is_resolved_without_a_pin_is_named(resolve):
    resolved = {"torch": "2.13.0", "yarl": "1.25.1", "nvidia-nvtx": "13.0.85"}
    pins = resolve.pins_of("# said\ntorch==2.13.0  # of SGLang\n\n")
    assert resolve.unpinned(resolved, pins, ()) == ["nvidia-nvtx==13.0.85", "yarl==1.25.1"]
    assert resolve.unpinned(resolved, pins, ("nvidia-",)) == ["yarl==1.25.1"]
    with pytest.raises(ValueError, match="pins no version: torch>=2"):
        resolve.pins_of("torch>=2\n")


def test_both_files_pin_by_version_alone_and_every_group_is_resolved(resolve):
    for file in resolve.FILES:
        assert resolve.pins_of(Path(file).read_text())["torch"]
    assert {"dev", "writers", "ray"} <= set(resolve.groups_of(Path("pyproject.toml")))


def test_an_extra_is_the_group_of_its_name():
    """pip installs a group without Pronk itself, which no extra allows."""
    tables = tomllib.loads(Path("pyproject.toml").read_text())
    groups, extras = tables["dependency-groups"], tables["project"]["optional-dependencies"]
    assert extras == {name: groups[name] for name in extras}
