# Each target sets up what it needs. `make train` and `make test` are the two to begin with.
#   PYTHON=python3.12 make test   chooses the interpreter (3.11 to 3.13) that makes .venv
#   PYTEST_ARGS="-k router" make test

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell sh .ci/find-python)
WORKERS ?= $(shell getconf _NPROCESSORS_ONLN)
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) $(PYTEST_ARGS)
INSTALL = $(BIN)/python -m pip install --quiet --no-input --disable-pip-version-check -c constraints.txt

.PHONY: train test test-full check lint format results test-slurm test-open-lm clean

train: $(VENV)/train.stamp
	$(BIN)/torchrun -m openlm_moe.main --moe-every 2 --experts 8

test: $(VENV)/test.stamp
	$(PYTEST) -m "not slow and not slurm"

test-full: $(VENV)/test-full.stamp
	$(PYTEST) -m "not slurm"

# The part of the suite that needs no process group and no interpreter, and the linters: a minute or so.
check: lint
	$(PYTEST) -m "not slow and not slurm and not distributed and not interpreter"

lint: $(VENV)/test.stamp
	$(BIN)/ruff check
	$(BIN)/ruff format --check

format: $(VENV)/test.stamp
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# Tables and figures of results/ again from its records, without training, and the test that they agree.
results: $(VENV)/test.stamp
	$(BIN)/python -m results.remake
	$(BIN)/python -m pytest -q tests/results

# A SLURM with two nodes on this machine. Needs slurmctld, slurmd and munged (Debian: slurm-wlm, munge) and root.
test-slurm: $(VENV)/test.stamp
	$(BIN)/python -m pytest -m slurm tests/launch $(PYTEST_ARGS)

test-open-lm:
	sh tests/hosts/open_lm/environment.sh "$(OPEN_LM_SOURCE)"

clean:
	rm -rf $(VENV) build dist *.egg-info

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "no Python 3.11 to 3.13 with venv found; name one: PYTHON=/path/to/python3.12 make $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# A stamp says that the pinned set of one extra is installed; pyproject.toml and constraints.txt make it stale.
$(VENV)/%.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) --editable ".[$*]"
	@touch $@
