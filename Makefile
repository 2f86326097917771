# make train: fresh machine -> environment -> trains the small Sokoban model here. make test: ... -> every CPU test.
PYTHON ?= python3
RECIPE ?= launch/recipes/sokoban_tiny.toml
ARGS ?=
VENV := .venv
PY := $(VENV)/bin/python

.PHONY: env train test lint clean tiny-models

env: $(VENV)/.done

$(VENV)/.done: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --group dev
	touch $@

train: env
	$(PY) launch/local.py --config $(RECIPE) $(ARGS)

# Makes the shipped models again, from nothing: about an hour on two cores.
tiny-models: env
	$(PY) launch/warm_start.py colour --out launch/models/colour_tiny --steps 100 --batch 32
	$(PY) launch/warm_start.py geo3k --out launch/models/geo3k_tiny --steps 400 --batch 16 --expertise 0.2
	$(PY) launch/warm_start.py sokoban --out build/stage1 --steps 2600 --batch 4 --lr 1.5e-3
	$(PY) launch/warm_start.py sokoban --start build/stage1 --out build/stage2 --seed 1 --steps 1500 --expertise 0.5 --threads 2
	$(PY) launch/warm_start.py sokoban --start build/stage2 --out build/stage3 --seed 2 --steps 1000 --expertise 0.5 --threads 2
	$(PY) launch/warm_start.py sokoban --start build/stage3 --out build/stage4 --seed 3 --steps 1500 --expertise 0.5
	$(PY) launch/warm_start.py sokoban --start build/stage4 --out launch/models/sokoban_tiny --seed 4 --steps 250 --lr 8e-4 --expertise 0.2 --threads 2

lint: env
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy

test: lint
	$(PY) -m pytest $(ARGS)

clean:
	rm -rf $(VENV) build
