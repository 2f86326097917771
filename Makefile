# make train         fresh machine -> environment -> trains the small Sokoban model here
# make check         format, lint, types and the fast tests: for every edit
# make test          all that runs on a CPU; make test-learning: what learns to a known answer; make test-watching:
#                    the dashboard in a browser; make test-sglang: against SGLang's server; make test-chaos: under
#                    faults; make test-hostile: under hostile input; make test-install: the wheel; make test-cluster:
#                    on Slurm and Ray; make test-long: a million mutated messages; make test-gpu: on an NVIDIA GPU
# make env TORCH=cpu the environment with torch's CPU build, where PyPI's brings gigabytes of CUDA; make check-pins: whether
#                    PyPI has what constraints.txt and constraints-gpu.txt ask for
PYTHON ?= python3
RECIPE ?= launch/recipes/sokoban_tiny.toml
ARGS ?=
ENGINE ?=
SGLANG_VENV ?= .venv-sglang
VENV := .venv
PY := $(VENV)/bin/python

# On GPUs learner and SGLang's server must have the same NCCL.
GPUS ?= $(shell nvidia-smi -L 2>/dev/null)
CONSTRAINTS := $(if $(GPUS),constraints-gpu.txt,constraints.txt)

# TORCH=cpu takes torch from PyTorch's own index, and from there torch alone: it does not have all versions of the rest.
TORCH ?=
TORCH_FROM :=
ifeq ($(TORCH),cpu)
CONSTRAINTS := constraints.txt
TORCH_FROM := --no-deps --index-url https://download.pytorch.org/whl/cpu
else ifneq ($(TORCH),)
$(error TORCH=$(TORCH): write TORCH=cpu for the build without CUDA, or leave it out)
endif

.PHONY: env sglang-env train tiny-models game-models two-boxes-model format lint lint-pages format-pages check check-pins test \
  test-learning test-watching test-sglang test-chaos test-hostile test-install test-long test-peft test-mcp test-clients test-cluster test-gpu docs \
  clean

env: $(VENV)/.done

$(VENV)/.done: pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("error: Python 3.11 or newer is needed, and $(PYTHON) is older: make env PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) $(strip $(TORCH_FROM) torch)
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) --group dev --editable .
	touch $@

# The environment of SGLang's server, never the learner's: make sglang-env
SGLANG_FILES := launch/engine_env.py launch/sglang_env/requirements-cpu.txt launch/sglang_env/constraints-cpu.txt

sglang-env: $(SGLANG_VENV)/.done

$(SGLANG_VENV)/.done: $(SGLANG_FILES)
	$(PYTHON) launch/engine_env.py $(SGLANG_VENV)
	touch $@

# make train ENGINE=sglang trains against SGLang's server instead of the embedded engine.
train: env $(if $(filter sglang,$(ENGINE)),sglang-env)
	$(PY) launch/local.py --config $(RECIPE) $(if $(ENGINE),--engine.kind $(ENGINE) --engine.sglang_env $(SGLANG_VENV)) $(ARGS)

SHOWN := --threads 2 --batch 32 --optimizer muon --decay 1 --compile
SOKOBAN := $(PY) launch/warm_start.py sokoban $(SHOWN)
TRIANGLES := $(PY) launch/warm_start.py triangles $(SHOWN) --lr 2e-3 --choice-weight 0.05
PLAYED := --jump 0.5 --scatter 0.4 --freeze-tower

# Makes the shipped models again, from nothing: 45 minutes on two cores. launch/models/sokoban_sees is shown no move
# of the solver at any stage; sokoban_tiny, made from it, is shown good moves within three moves of the solution;
# triangles_tiny is never told which of the numbers that it writes answers a question.
tiny-models: env
	$(PY) launch/warm_start.py colour --out launch/models/colour_tiny --steps 100 --batch 32
	$(PY) launch/warm_start.py colour_qwen35 --out launch/models/colour_qwen35_tiny --steps 100 --batch 32
	$(PY) launch/warm_start.py colour_glm --out launch/models/colour_glm_tiny --steps 100 --batch 32
	$(PY) launch/warm_start.py colour_text --out launch/models/colour_text_tiny --steps 100 --batch 32
	$(PY) launch/warm_start.py geo3k --out launch/models/geo3k_tiny --steps 400 --batch 16 --expertise 0.2
	$(TRIANGLES) --out build/triangles --turns 1 --steps 1500
	$(TRIANGLES) --start build/triangles --out launch/models/triangles_tiny --seed 1 --steps 800
	$(SOKOBAN) --out build/reads --tower-steps 300 --steps 800 --turns 2 --jump 1 --wall-chances 0.05 0.15 0.3 --expertise 0 --choice-weight 0.1 --lr 2e-3
	$(SOKOBAN) --start build/reads --out launch/models/sokoban_sees --seed 1 --steps 350 $(PLAYED) --wall-chances 0.05 0.15 0.3 --expertise 0 --choice-weight 0.1 --lr 2e-3
	$(SOKOBAN) --start launch/models/sokoban_sees --out launch/models/sokoban_tiny --seed 3 --steps 550 $(PLAYED) --wall-chances 0.05 0.15 --expertise 0.5 --near 0.3 --choice-weight 0.3 --lr 1.5e-3

# Makes the starts of the games and the scenes, in some 80 minutes of one busy core. The shipped ones saw scenes in other
# words before (games_tiny in two stages, scene_zoom_tiny in one), and puzzles only after an even number of moves before
# the last stage.
GAMES := $(PY) launch/warm_start.py games --batch 32 --optimizer muon --decay 1 --turns 12
GAMES_ON := --choice-weight 0.02 --lr 1.5e-3 --freeze-tower
ZOOM := $(PY) launch/warm_start.py scene_zoom --batch 32 --optimizer muon --decay 1
game-models: env
	$(GAMES) --out build/games_1 --tower-steps 300 --steps 700 --choice-weight 0.05 --lr 2e-3
	$(GAMES) --start build/games_1 --out build/games_2 --seed 1 --steps 600 $(GAMES_ON)
	$(GAMES) --start build/games_2 --out build/games_3 --seed 2 --steps 700 $(GAMES_ON)
	$(GAMES) --start build/games_3 --out build/games_4 --seed 3 --steps 800 $(GAMES_ON)
	$(GAMES) --start build/games_4 --out launch/models/games_tiny --seed 4 --steps 500 $(GAMES_ON)
	$(ZOOM) --out build/zoom_1 --tower-steps 150 --steps 500 --choice-weight 0.1 --lr 2e-3
	$(ZOOM) --start build/zoom_1 --out build/zoom_2 --seed 1 --steps 300 --choice-weight 0.05 --lr 1.5e-3 --freeze-tower
	$(ZOOM) --start build/zoom_2 --out launch/models/scene_zoom_tiny --seed 2 --steps 700 --choice-weight 0.02 --lr 2e-3 --freeze-tower

# Makes the start of sokoban_two_boxes.toml from what make train has learned (the shipped one, from a run of 170 steps):
# 40 minutes on two cores. It learns to read boards of two boxes, then is shown good moves within three moves of the solution.
TWO_BOXES := --boxes 2 $(PLAYED) --lr 1.5e-3
two-boxes-model: env
	$(PY) -m learner.export runs/sokoban_tiny/checkpoints/step_00000230 --out build/learned
	$(SOKOBAN) --start build/learned --out build/two_boxes_1 --seed 5 --steps 450 $(TWO_BOXES) --wall-chances 0.05 0.15 --expertise 0 --choice-weight 0.001
	$(SOKOBAN) --start build/two_boxes_1 --out build/two_boxes_2 --seed 6 --steps 300 $(TWO_BOXES) --wall-chances 0.05 --expertise 0 --choice-weight 0.001
	$(SOKOBAN) --start build/two_boxes_2 --out launch/models/sokoban_two_boxes --seed 7 --steps 110 $(TWO_BOXES) --wall-chances 0.05 --expertise 0.5 --near 0.3 --choice-weight 0.3

# A million mutated messages against the wire, then more that coverage guides.
test-long: env
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) --group fuzz
	$(PY) -m tests.fuzz --messages 1000000 $(ARGS)
	$(PY) -m tests.fuzz.guided --messages 200000 $(ARGS)

format: env
	$(VENV)/bin/ruff format --quiet .
	$(VENV)/bin/ruff check --quiet --fix .

# Lint collects the tests in COLLECTED, to see that they can be imported; beside a run of tests/ only the others.
COLLECTED := tests tests/sglang tests/cluster tests/gpu tests/installed
lint: env
	$(VENV)/bin/ruff format --check --quiet .
	$(VENV)/bin/ruff check --quiet .
	$(VENV)/bin/mypy
	$(VENV)/bin/ruff check --quiet --select D401 actor envs kernels launch learner shared
	$(PY) -m tests.lint.docstrings
	@mkdir -p build
	$(PY) -m pytest --collect-only --quiet $(COLLECTED) > build/collected || { tail -n 20 build/collected; exit 1; }

# The dashboard's JavaScript and CSS. Needs Node 18 or newer; make lint does not.
PAGES := "launch/dashboard_pages/*.{js,css,html}" .ci/eslint.config.mjs
PRETTIER := npx --yes prettier@3.6.2 --print-width 120

lint-pages:
	$(PRETTIER) --check $(PAGES)
	npx --yes eslint@9.39.1 --config .ci/eslint.config.mjs "launch/dashboard_pages/*.js"

format-pages:
	$(PRETTIER) --write $(PAGES)

# Three processes on two cores: a fifth of the tests' time is waiting. Lint, on one core, runs beside them.
PYTEST = $(PY) -m pytest --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder
PROCESSES := 3
define with_lint
@$(MAKE) --no-print-directory lint COLLECTED="tests/sglang tests/cluster tests/gpu tests/installed" & lint=$$!; \
$(PYTEST) $(1) $(ARGS); tests=$$?; \
wait $$lint || { echo "error: lint failed; what it found stands above, make lint shows it alone" >&2; exit 1; }; \
exit $$tests
endef

check: PROCESSES := 2
check: env
	$(call with_lint,-m "not slow")

# pip of its own, so that it runs where no environment can be made.
check-pins:
	@test -e build/pins/.done || { $(PYTHON) -m venv --clear build/pins && \
	  build/pins/bin/python -m pip install --quiet --disable-pip-version-check pip==26.3 && touch build/pins/.done; }
	@build/pins/bin/python .ci/resolve.py

# Tests start some two hundred processes, which need not compile the modules again.
test: env
	$(PY) -m compileall -q actor envs kernels launch learner shared tests
	$(call with_lint,-m "not learning and not browser")

test-learning: env
	$(PYTEST) --dist worksteal -m learning tests/system/test_stability.py tests/system/test_end_to_end.py tests/system/test_tasks_end_to_end.py $(ARGS)

# The dashboard's pages in the system's Chromium; screenshots go to build/screenshots.
test-watching: env
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) --group watch
	$(PY) -m pytest -m browser tests/launch/dashboard_pages/test_pages.py tests/launch/dashboard_pages/test_pages_of_a_run.py $(ARGS)

test-sglang: env sglang-env
	PRONK_ENGINE__SGLANG_ENV=$(SGLANG_VENV) $(PY) -m pytest tests/sglang $(ARGS)

# Breaks a running system at random for five minutes and audits its ledger; the faults of the disk need root.
test-chaos: env
	$(PY) -m tests.chaos --minutes 5 $(ARGS)

# Sends hostile input to every socket of a running system for 90 seconds.
test-hostile: env
	$(PY) -m tests.hostile --seconds 90 $(ARGS)

# Adapters against the peft library, which stays out of the environment: transformers would import it with every model.
test-peft: env
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target build/peft peft==0.21.2 accelerate==1.15.0 psutil
	PYTHONPATH=build/peft $(PY) -m pytest tests/learner/checkpoints/test_peft.py $(ARGS)

# The wheel, installed into an empty environment beside the packages of this one: `make test-install`.
test-install: env
	$(PY) -m pytest tests/installed $(ARGS)

# Tools of an MCP server, whose packages stay out of the environment.
test-mcp: env
	$(PY) -m pip install --quiet --disable-pip-version-check --upgrade --target build/mcp --constraint $(CONSTRAINTS) --group mcp
	PYTHONPATH=build/mcp $(PY) -m pytest tests/envs/tools/test_mcp_tools.py $(ARGS)

# Agents through the published clients of OpenAI and Anthropic and through a framework, which stay out of the environment.
test-clients: env
	$(PY) -m pip install --quiet --disable-pip-version-check --upgrade --target build/clients --constraint $(CONSTRAINTS) --group clients
	PYTHONPATH=build/clients $(PY) -m pytest tests/actor/test_real_clients.py tests/system/test_agent_examples.py $(ARGS)

# Runs on real clusters, all of their nodes on this machine: Ray, and Slurm (Debian's slurm-wlm and munge, as root).
test-cluster: env
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) --group ray --group manifests
	test -e build/skypilot/.done || { $(PYTHON) -m venv --clear build/skypilot && \
	  build/skypilot/bin/python -m pip install --quiet --disable-pip-version-check skypilot==0.14.1 && touch build/skypilot/.done; }
	$(PY) -m pytest tests/cluster $(ARGS)

# On one NVIDIA GPU: kernels, a learner's step, the embedded engine, the whole loop, the doctor.
test-gpu: env
	$(PY) -m pytest tests/gpu $(ARGS)

# The documentation, strictly, into build/site; pages of the reference are made from the code.
docs: env
	$(PY) -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) --group docs
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) $(SGLANG_VENV) build
