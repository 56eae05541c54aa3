# `make run` and `make test` need Python >= 3.11 with venv, and nothing else beforehand.
PYTHON ?= python3
BIN := .venv/bin
INSTALL := -m pip install --quiet --disable-pip-version-check -c constraints.txt
PIP := $(BIN)/python $(INSTALL)
# Modular MAX is proprietary and under its own licence: only `make test-max` installs it.
MAX ?= 25.7.0

.PHONY: run test test-peers test-max lint bench clean

define new_venv
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
  || { echo "headwise needs Python 3.11 or newer; name it: make PYTHON=python3.12 …" >&2; exit 1; }
@$(PYTHON) -m venv --clear $(1) > /dev/null 2>&1 \
  || { echo "$(PYTHON) cannot make a virtual environment; on Debian: apt install python3-venv" >&2; exit 1; }
endef

run: .venv/.run
	@$(BIN)/headwise look --out headwise-look.html

test: .venv/.dev lint
	@$(BIN)/python -m pytest

test-peers: .venv-peers/.made
	@.venv-peers/bin/python -m pytest -c peers/pytest.ini peers/test_*.py

test-max: .venv-max/.max-$(MAX)
	@.venv-max/bin/python -m pytest -c peers/pytest.ini peers/modular_max

lint: .venv/.dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/pyright

bench: .venv/.bench
	@$(BIN)/python benchmarks/layer.py
	@$(BIN)/python benchmarks/observe.py

.venv/.made:
	$(call new_venv,.venv)
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

.venv-peers/.made: pyproject.toml constraints.txt peers/constraints.txt
	$(call new_venv,.venv-peers)
	@echo "installing the peers (JAX, Flax, Keras and others) into .venv-peers (once only) …"
	@.venv-peers/bin/python $(INSTALL) -c peers/constraints.txt \
	  -e . pytest transformers x-transformers keras flax jax
	@.venv-peers/bin/python $(INSTALL) -c peers/constraints.txt --no-deps timm
	@touch $@

.venv-max/.max-$(MAX): pyproject.toml constraints.txt
	$(call new_venv,.venv-max)
	@echo "installing Modular MAX $(MAX), under its own licence, into .venv-max (once only) …"
	@.venv-max/bin/python $(INSTALL) max==$(MAX) \
	  || { echo "MAX $(MAX) could not be installed: it has wheels for Linux (glibc 2.34 or newer) and for macOS on arm64 only" >&2; exit 1; }
	@.venv-max/bin/python $(INSTALL) -e . pytest rich transformers
	@touch $@

clean:
	rm -rf .venv .venv-peers .venv-max build dist .pytest_cache .ruff_cache .hypothesis headwise-look.html
