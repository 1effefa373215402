# make demo | bench | test | test-slow | reliability | coverage | check | docs | docs-serve | clean. Each creates .venv itself and reinstalls only when pyproject.toml or
# constraints.txt has changed.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
DATA ?= digits
OUT ?= demo-output
BENCH ?= bench-output
THREADS ?= 1
BIN := .venv/bin
STAMP := .venv/.installed

ifndef LAPWING_DATA
LAPWING_DATA := $(abspath $(wildcard ../shared/data))
endif
ifneq ($(LAPWING_DATA),)
export LAPWING_DATA
endif

.PHONY: demo bench test test-slow reliability coverage check docs docs-serve clean

demo: $(STAMP)
	$(BIN)/python -m lapwing demo --data $(DATA) --out $(OUT)

# QUICK=1 for ten minutes; THREADS="1 2"; the environment of the peers, .venv-peers, is made when it is missing
bench: $(STAMP)
	$(BIN)/python -m lapwing bench $(if $(QUICK),--quick) --out $(BENCH) --threads $(THREADS)

PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# all but the slow ones: at most 15 minutes on two cores
test: check
	$(PYTEST) -m "not slow" $(TESTS)

# those marked slow, among them every experiment in its smoke form
test-slow: $(STAMP)
	$(PYTEST) -m slow --durations 10 $(TESTS)

# the table of docs/reliability.md, of all tests by category
reliability: $(STAMP)
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m tests.reliability

# which lines of the package no test runs (but the slow ones): about an hour on one core; TESTS=tests/linalg
coverage: $(STAMP)
	$(BIN)/python -m coverage erase
	-OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m coverage run -m pytest -q -m "not slow" $(TESTS)
	$(BIN)/python -m coverage combine -q
	$(BIN)/python -m coverage report

# the documentation in site/; tutorials run once and are kept until they or the package change
docs: $(STAMP)
	OMP_NUM_THREADS=1 NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

docs-serve: $(STAMP)
	OMP_NUM_THREADS=1 NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_architecture.py tests/test_exports.py

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf .venv .venv-peers build site $(OUT) $(BENCH) src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
