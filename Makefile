# Two commands are all a newcomer needs: `make book` and `make test`. `make help` lists the rest.
PYTHON ?= python3
PIP ?= $(BIN)/python -m pip
PROFILE ?= quick
JOBS ?= 2
ONLY ?=
BIN := .venv/bin
RUN := $(BIN)/python -m lib.book
NBVAL := --nbval --nbval-current-env --nbval-sanitize-with tests/nbval_sanitize.cfg
NOTEBOOKS := index.ipynb chapters
export PYTHONHASHSEED = 0
export PYDEVD_DISABLE_FILE_VALIDATION = 1
# More threads than cores make every chapter slower, and a fixed number keeps the order of sums.
export OMP_NUM_THREADS ?= 1
export OPENBLAS_NUM_THREADS ?= 1
export MKL_NUM_THREADS ?= 1
export NUMBA_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup book run html test lint unit nbval pages accept claims bench clean

help:  ## list the commands
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 10
	@echo 'options: PROFILE=smoke|quick|paper  ONLY=<chapter>[,<chapter>]  JOBS=2  PYTHON=python3'

setup: .venv/.ok  ## make .venv and install what is pinned

book: html  ## run every chapter whose inputs changed, build the pages

run: .venv/.ok
	@$(RUN) run --profile $(PROFILE) --jobs $(JOBS) --only '$(ONLY)'

html: .venv/.ok run
	@$(RUN) build --profile $(PROFILE) --only '$(ONLY)'

test: .venv/.ok  ## lint, unit tests, nbval, checks of the pages
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory unit
	@$(MAKE) --no-print-directory book PROFILE=quick ONLY=
	$(BIN)/python -m pytest -q $(NBVAL) --nbval-replay _build/executed/quick $(NOTEBOOKS)
	@$(MAKE) --no-print-directory pages

lint: .venv/.ok  ## ruff, mypy, spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check lib tests benchmarks conftest.py
	$(BIN)/mypy -p lib
	$(BIN)/codespell index.md README.md chapters/*.md lib tests benchmarks data/claims.yml

unit: .venv/.ok  ## pytest alone
	$(BIN)/python -m pytest -q -n 2 tests

nbval: .venv/.ok  ## plain nbval: execute every chapter and compare (no replay), as in anyone's CI
	$(BIN)/python -m pytest -q $(NBVAL) -n 2 --dist loadfile $(NOTEBOOKS)

pages: .venv/.ok  ## checks of the built pages, with a headless Chromium where there is one
	$(BIN)/python -m pytest -q --html-root _build/html tests/html_checks.py tests/browser_checks.py

accept: book  ## make the executed chapters the new references; look at the diff
	@$(RUN) accept

claims: .venv/.ok  ## print every claim's verdict, write _build/claims.json
	@$(RUN) claims --profile $(PROFILE)

bench: .venv/.ok  ## time ours against the plain loops, write _build/bench.json
	$(BIN)/python -m benchmarks

clean:  ## remove built pages and executed notebooks (.venv stays)
	rm -rf _build .pytest_cache .ruff_cache .mypy_cache .hypothesis

.venv/.ok: requirements.txt constraints.txt pyproject.toml
	@echo 'setting up .venv (a few minutes the first time)'
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or later is needed: make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(PIP) install -q --disable-pip-version-check -r requirements.txt -c constraints.txt
	$(PIP) install -q --disable-pip-version-check --no-deps -e .
	@touch $@
