# Trainmaster. `make demo` and `make test` do all their own set-up on a machine with Python 3.11+, git and make.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Test files run side by side; many of them wait for ranks and servers more than they compute.
WORKERS ?= 2
export TRAINMASTER_HOME ?= $(CURDIR)/.trainmaster

.PHONY: help demo test lint types unit again fuzz api-fuzz chaos chaos-control outages serve clean system-packages
help: ## this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 20

demo: $(VENV)/.run ## check this machine, train a small model on it, write the report
	$(BIN)/trainmaster demo

test: $(VENV)/.dev system-packages lint types unit ## set up everything, then lint, types and every test

lint: $(VENV)/.dev ## ruff: style and mistakes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev ## mypy, strict
	$(BIN)/mypy

unit: $(VENV)/.dev ## the tests alone; skipped ones are listed with their reason
	$(BIN)/pytest -rs -n $(WORKERS) --dist loadfile || $(MAKE) --no-print-directory again

# Hundreds of tests start real servers, ranks and agents and kill them; on a busy machine one of them can be late.
again: $(VENV)/.dev ## the tests that failed, once more and one at a time; what fails twice has failed
	@echo "These failed, and run once more by themselves:"
	$(BIN)/pytest -rs -v --last-failed --last-failed-no-failures none

fuzz: $(VENV)/.dev ## 100,000 damaged inputs for every parser; ARGS='--only dcgm --seed 7 --cases 1' runs one again
	PYTHONPATH=tests $(BIN)/python -m fuzz $(ARGS)

api-fuzz: $(VENV)/.dev ## 6,500 cases of the API's own document; ARGS='--seed 7 --as viewer' asks others
	PYTHONPATH=tests $(BIN)/python -m web.api_fuzz $(ARGS)

chaos: $(VENV)/.dev ## kill and damage a run in every way; ARGS='--seed 7 --case 31' lives through one case again
	PYTHONPATH=tests $(BIN)/python -m train.crash $(ARGS)

chaos-control: $(VENV)/.dev ## kill the control plane at every commit and effect; ARGS='--sample 6' draws some places
	PYTHONPATH=tests $(BIN)/python -m control.drill $(ARGS)

outages: $(VENV)/.dev ## database, storage and disk gone for a whole minute, under a running job
	TRAINMASTER_OUTAGE_S=60 $(BIN)/pytest tests/control/test_outages.py -o timeout=900

serve: $(VENV)/.run ## the dashboard over this clone's home folder
	$(BIN)/trainmaster serve

system-packages: ## what the browser tests need, where we may install it
	@sh tools/system-packages.sh

clean: ## remove the virtual environment and this clone's jobs
	rm -rf $(VENV) .trainmaster

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Trainmaster needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,server]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.run
