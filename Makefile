# archipel: `make demo` runs the main job, `make test` checks everything. Both set up .venv first; both can be run again.

SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
NODE_READY := web/node_modules/.package-lock.json

.PHONY: help demo test test-all lint clean

help:
	@echo "make demo      install into .venv and run the main job (writes report.html)"
	@echo "make test      lint, types, import rules and the test suite"
	@echo "make test-all  the same with the long suites"
	@echo "make lint      lint, types and import rules only"
	@echo "make clean     remove .venv and everything built"

demo: $(READY)
	@$(BIN)/archipel demo $(ARGS)

test: $(READY) $(NODE_READY) lint
	@$(BIN)/python scripts/test_rooms.py

test-all: $(READY) $(NODE_READY) lint
	@$(BIN)/python scripts/test_rooms.py --slow

lint: $(READY)
	@echo "== lint";         $(BIN)/ruff check --quiet . && $(BIN)/ruff format --quiet --check .
	@echo "== types";        $(BIN)/mypy --no-error-summary
	@echo "== import rules"; $(BIN)/lint-imports --no-cache >$(VENV)/.imports 2>&1 || { cat $(VENV)/.imports; exit 1; }

# The stamp holds until what decides the installation changes.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "archipel needs Python 3.11 or newer: make PYTHON=/path/to/python3"; exit 1; }
	@echo "== setting up $(VENV) (once; a few minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]' \
		|| { echo "installation failed: see above; then run make again"; exit 1; }
	@touch $(READY)

$(NODE_READY): web/package-lock.json
	@if command -v npm >/dev/null; then echo "== setting up web/node_modules"; cd web && npm ci --silent --ignore-scripts --no-audit --no-fund && touch node_modules/.package-lock.json; \
		else echo "Node.js 20 is missing: tests of the browser's runtime are skipped"; fi

clean:
	rm -rf $(VENV) web/node_modules .cache build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .coverage*
