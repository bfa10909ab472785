# Each target sets up .venv by itself. PYTHON=python3.12 chooses another interpreter.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: quickstart test check bench

quickstart: .venv/.installed
	$(BIN)/twofold quickstart

test: export OMP_NUM_THREADS = 1
test: .venv/.installed
	$(BIN)/python -m pytest -n 2

check: .venv/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python benchmarks/results.py

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@
