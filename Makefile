# `make run` and `make test` need Python >= 3.11 with venv, and nothing else beforehand.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: run test lint bench clean

run: .venv/.run
	@$(BIN)/headwise look --out headwise-look.html

test: .venv/.dev lint
	@$(BIN)/python -m pytest

lint: .venv/.dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/pyright

bench: .venv/.bench
	@$(BIN)/python benchmarks/layer.py
	@$(BIN)/python benchmarks/observe.py

.venv/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "headwise needs Python 3.11 or newer; name it: make PYTHON=python3.12 …" >&2; exit 1; }
	@$(PYTHON) -m venv --clear .venv > /dev/null 2>&1 \
	  || { echo "$(PYTHON) cannot make a virtual environment; on Debian: apt install python3-venv" >&2; exit 1; }
	@touch $@

.venv/.run: .venv/.made pyproject.toml constraints.txt
	@echo "installing headwise into .venv (PyTorch is large; once only) …"
	@$(PIP) -e '.[page]'
	@touch $@

.venv/.dev: .venv/.made pyproject.toml constraints.txt
	@echo "installing headwise and its test tools into .venv (once only) …"
	@$(PIP) -e '.[dev]'
	@touch $@ .venv/.run

.venv/.bench: .venv/.dev
	@$(PIP) -e '.[bench]'
	@touch $@

clean:
	rm -rf .venv build dist .pytest_cache .ruff_cache .hypothesis headwise-look.html
