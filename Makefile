# Everything on a machine with Python 3.11 or newer and make. PYTHON=... chooses another interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Training uses little of what is installed, and Python compiles that itself; tests start many processes, see below.
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-compile --constraint constraints.txt
# What stands in .venv: what training needs; and, on top, what tests, checks, documents and benchmarks need.
INSTALLED := $(VENV)/.installed
INSTALLED_ALL := $(VENV)/.installed-all
PYTEST := $(BIN)/python -m pytest -n auto --dist worksteal
# What the fast lane leaves out: pyproject.toml says what each mark means.
REST := network or processes or browser or site or benchmark or gallery or gpu or slow

.PHONY: train test test-rest test-all install check format bench chaos fuzz docs clean

# FedEM on the paper's synthetic mixture beside FedAvg and Local; fewer test samples than the paper's 5,000 a client.
train: $(INSTALLED)
	$(BIN)/fedem train --data synthetic --method fedem --components 3 --rounds 100 \
		--set data.num_test=500 --baselines fedavg,local

# The fast lane: a few minutes on two cores.
test: install
	$(PYTEST) -m "not ($(REST))"

test-rest: install
	$(PYTEST) -m "$(REST)"

# Everything: the fast lane with more examples of each property, then the rest.
test-all: export FEDEM_EXAMPLES = many
test-all: test test-rest

install: $(INSTALLED_ALL)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedem needs Python 3.11 or newer")'
	@echo "Installing fedem and what training needs into $(VENV): one to two minutes, most of it torch."
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --quiet setuptools
	@$(PIP) --quiet --no-build-isolation --editable .
	@touch $@

$(INSTALLED_ALL): $(INSTALLED)
	@echo "Installing what tests, checks and documents need on top: a few minutes."
	@$(PIP) --quiet --no-build-isolation --editable '.[dev]'
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true  # a few packages ship templates that are not Python
	@touch $@

check: install
	scripts/check

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: install
	$(BIN)/python -m benchmarks
	$(BIN)/python -m benchmarks.methods
	$(BIN)/python -m benchmarks.images
	$(BIN)/python -m benchmarks.processes

# Processes that train are killed KILLS times at random moments, those of a deployment a share as often, and nodes lie
# (docs/security.md); `make test-all` does so a few times.
KILLS ?= 1000
chaos: export FEDEM_KILLS = $(KILLS)
chaos: install
	$(BIN)/python -m pytest -q tests/chaos

# Damaged inputs for everything that reads, INPUTS in all, and a table of what came of them; `make test` tries some.
INPUTS ?= 100000
fuzz: install
	scripts/fuzz --inputs $(INPUTS)

# The banner that is silenced is about another program's plans.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build site .mypy_cache .ruff_cache .pytest_cache
