# Everything runs in .venv, which is made here and renewed only when pyproject.toml or constraints.txt change.
#
#   make serve ARGS="--port 18000"    start a server with all services
#   make test                         fast tests;  make test-slow: the long ones
#   make check                        lint and fast tests
#   make sim SEED=17                  one history of the simulation;  make bench: the figures of the engine's parts

PYTHON ?= python3
ARGS ?=
SEED ?=
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq

.PHONY: help serve chat test test-slow lint check bench sim format clean

help:
	@sed -n '3,6s/^#  //p' Makefile

# ---- environments: one folder, two depths

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"radixmesh needs Python 3.11 or newer, {sys.executable} is {sys.version.split()[0]}: make PYTHON=python3.11")'
	@$(PYTHON) -m venv .venv

.venv/.serve: pyproject.toml constraints.txt | .venv/bin/python
	@echo 'Installing into .venv, a minute or two ...'
	@$(PIP) install --constraint constraints.txt --editable '.[serve]'
	@touch $@

.venv/.dev: pyproject.toml constraints.txt | .venv/bin/python
	@echo 'Installing into .venv, a minute or two ...'
	@$(PIP) install --constraint constraints.txt --editable '.[dev]'
	@touch $@ .venv/.serve

# ---- what people do

serve: .venv/.serve
	@exec $(BIN)/radixmesh serve $(ARGS)

chat: .venv/.serve
	@exec $(BIN)/radixmesh chat $(ARGS)

test: .venv/.dev
	$(BIN)/python -m pytest $(ARGS)

test-slow: .venv/.dev
	$(BIN)/python -m pytest -m slow $(ARGS)

sim: .venv/.dev
	$(BIN)/python -m pytest tests/simulation $(if $(SEED),-k '[$(SEED)]') $(ARGS)

lint: .venv/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

check: lint test

BENCHMARKS := $(filter-out machine,$(patsubst benchmarks/%.py,%,$(wildcard benchmarks/*.py)))
bench: .venv/.dev
	@for name in $(BENCHMARKS); do echo "== $$name"; $(BIN)/python -m benchmarks.$$name || exit 1; done

format: .venv/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
