# Each target sets up .venv by itself. PYTHON=python3.12 chooses another interpreter.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: quickstart test test-without-compiler check bench

quickstart: .venv/.installed
	$(BIN)/twofold quickstart

test: export OMP_NUM_THREADS = 1
test: .venv/.installed
	$(BIN)/python -m pytest -n 2

# The same, installed where the compiler fails. TESTS=tests/attention runs some of them.
test-without-compiler: export OMP_NUM_THREADS = 1
test-without-compiler: .venv/.installed
	rm -rf build/plain
	$(PYTHON) -m venv build/plain
	$(BIN)/python -c "import site; print(site.getsitepackages()[0])" > "$$(echo build/plain/lib/python*/site-packages)/dev.pth"
	CXX=false build/plain/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -C build-dir=build/plain/cmake .
	build/plain/bin/python -c "from twofold.kernels import native; assert native.load_library() is None"
	build/plain/bin/python -m pytest -n 2 $(TESTS)

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
