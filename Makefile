# Two commands set up everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0

SEQUENCES ?= 20000
SEED ?= $(shell date +%s)
PROCESSES ?= 1

.PHONY: demo test fuzz lint bench docs clean

# The CPU build of torch goes in first and pinned: a bare `torch` pulls gigabytes of CUDA packages.
$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet $(TORCH)
	$(BIN)/pip install --quiet -e ".[dev]"
	touch $@

demo: $(VENV)/.installed
	$(BIN)/plait demo

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# Sequences drawn anew each time, about 10 a second and process; failing draws are named and kept in .hypothesis.
fuzz: $(VENV)/.installed
	$(BIN)/python -W ignore -m tests.fuzz.many --sequences $(SEQUENCES) --seed $(SEED) --processes $(PROCESSES)

lint: $(VENV)/.installed
	$(BIN)/ruff format --check src tests examples
	$(BIN)/ruff check src tests examples
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.installed
	$(BIN)/pip install --quiet -e ".[peers]"
	$(BIN)/plait bench layers

# The site goes to build/site; open build/site/index.html.
docs: $(VENV)/.installed
	$(BIN)/pip install --quiet -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

clean:
	rm -rf $(VENV) build src/*.egg-info
