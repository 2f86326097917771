"""Tests that another distribution's package `kernels` ends a start in one line with the cure."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from launch.processes.same_name import with_kernels
from tests.support.runs import command, places, refused


def installed(folder, name, version, **files):
    """Leave a distribution's files as pip does."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    for file, text in files.items():
        (info / file.replace("__", ".")).write_text(text)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["learner", "local", "actors", "evaluate"])
def test_hugging_faces_kernels_is_named_with_its_cure(tmp_path, monkeypatch, script):
    installed(tmp_path, "kernels", "0.18.2")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    line, everything = refused(command(script, places(tmp_path / "runs")))
    assert everything.splitlines() == [line]
    assert "installed here: kernels" in line and "pip uninstall kernels" in line
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_the_doctor_names_it_and_starts_no_trial(tmp_path, monkeypatch):
    installed(tmp_path, "kernels", "0.18.2")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    doctor = [sys.executable, "launch/doctor.py", "--json", *places(tmp_path)]
    done = subprocess.run(doctor, capture_output=True, text=True, timeout=250)
    found = {each["name"]: each for each in json.loads(done.stdout.splitlines()[-1])["checks"]}
    assert done.returncode == 1 and found["trial"]["state"] == "not checked"
    assert found["packages"]["state"] == "failed" and "pip uninstall kernels" in found["packages"]["cure"]


@pytest.mark.parametrize(
    ("name", "files", "found"),
    [
        ("fast-ops", {"RECORD": "fast_ops/__init__.py,,\nkernels/__init__.py,sha256=x,3\n"}, ["fast-ops"]),
        ("fast-ops", {"RECORD": "kernels.py,sha256=x,3\n"}, ["fast-ops"]),
        ("fast-ops", {"top_level__txt": "fast_ops\nkernels\n"}, ["fast-ops"]),
        ("fast-ops", {"RECORD": "fast_ops/kernels/__init__.py,,\nkernels_data/a.bin,,\n"}, []),
        ("pronk", {"RECORD": "kernels/__init__.py,,\n"}, []),
    ],
)
def test_whatever_brings_a_package_of_that_name_is_found(tmp_path, monkeypatch, name, files, found):
    installed(tmp_path, name, "1.0", **files)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert with_kernels() == found
