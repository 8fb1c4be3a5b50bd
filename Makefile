# Everything on a machine with Python 3.11 and make. PYTHON=... chooses another interpreter.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: train test install check format bench docs clean

# FedEM on the paper's synthetic mixture beside FedAvg and Local; fewer test samples than the paper's 5,000 a client.
train: install
	$(BIN)/fedem train --data synthetic --method fedem --components 3 --rounds 100 \
		--set data.num_test=500 --baselines fedavg,local

test: install
	$(BIN)/python -m pytest -n auto --dist worksteal

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedem needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt setuptools
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--no-build-isolation --editable '.[dev]'
	touch $(STAMP)

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

# The banner that is silenced tells of another program's plans.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) build site .mypy_cache .ruff_cache .pytest_cache
