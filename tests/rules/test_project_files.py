"""The files about the project say what is there: the workflow's commands, the table of checks, the citation."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

TARGETS = set(re.findall(r"^([\w-]+):", Path("Makefile").read_text(), re.M))
PAGES = ("AGENTS.md", "CONTRIBUTING.md", "SECURITY.md", "README.md", ".github/workflows/ci.yml")


@pytest.mark.parametrize("page", PAGES)
def test_every_make_target_that_a_page_names_exists(page: str) -> None:
    named = set(re.findall(r"(?:`|run: )make ([\w-]+)", Path(page).read_text()))
    assert not named - TARGETS
    assert named or page == "SECURITY.md"


@pytest.mark.parametrize("page", PAGES[:3])
def test_every_link_and_file_of_these_pages_exists(page: str) -> None:
    text = Path(page).read_text()
    targets = re.findall(r"\]\(([^)#\s]+)", text) + re.findall(r"`((?:launch|tests|envs|shared|docs)/[\w./-]+)`", text)
    assert [target for target in targets if not Path(target).exists() and "PART" not in target] == []


def test_the_workflow_checks_each_python_that_the_project_names() -> None:
    workflow = yaml.safe_load(Path(".github/workflows/ci.yml").read_text())
    pythons = set(workflow["jobs"]["test"]["strategy"]["matrix"]["python"])
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    named = {each.rpartition(" ")[2] for each in project["classifiers"] if each.startswith("Programming Language")}
    assert pythons == named
    commands = [step["run"] for step in workflow["jobs"]["test"]["steps"] if "run" in step]
    assert {command.split()[1] for command in commands} >= {"env", "check", "test"}


def test_the_forms_of_issues_and_the_citation_can_be_read() -> None:
    for form in Path(".github/ISSUE_TEMPLATE").glob("*.yml"):
        read = yaml.safe_load(form.read_text())
        assert form.stem == "config" or {"name", "description", "body"} <= set(read)
    citation = yaml.safe_load(Path("CITATION.cff").read_text())
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    assert citation["license"] == project["license"]
    assert citation["cff-version"] == "1.2.0" and citation["title"].startswith("Pronk")
