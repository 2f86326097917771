# make train: fresh machine -> environment -> trains the small Sokoban model here. make test: ... -> every CPU test.
PYTHON ?= python3
RECIPE ?= launch/recipes/sokoban_tiny.toml
ARGS ?=
VENV := .venv
PY := $(VENV)/bin/python

.PHONY: env train test lint clean

env: $(VENV)/.done

$(VENV)/.done: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --group dev --editable .
	touch $@

train: env
	$(PY) launch/local.py --config $(RECIPE) $(ARGS)

lint: env
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

test: lint
	$(PY) -m pytest $(ARGS)

clean:
	rm -rf $(VENV) build *.egg-info
