# Everything runs in .venv, which the first target creates. Only Python 3.11 or newer, with its
# venv module, has to be there. A change of pyproject.toml installs again.

PYTHON ?= python3
PYTEST_WORKERS ?= 2
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
# Most of a test run is compilation, so what was compiled once is kept, and the quick tests do
# without the optimisations of machine code and the emitters of fused loops, which take two thirds
# of it. The slow tests have them. XLA aborts at a flag it does not know, so each is tried first.
FAST_FLAGS := --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false
FAST_COMPILE = XLA_FLAGS="$$XLA_FLAGS $$($(BIN)/python tools/xla_flags.py $(VENV)/.xla-flags \
    $(FAST_FLAGS))"
CACHE := JAX_COMPILATION_CACHE_DIR=.cache/jax JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0.1
PYTEST := $(CACHE) $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-mpi lint format types build clean

help:
	@echo "make demo       train a small model, dense and sparse, and compare them (ARGS='--help')"
	@echo "make test       run the tests, without the slow ones"
	@echo "make test-slow  run the slow tests"
	@echo "make test-mpi   build mpi4jax and run the tests over MPI; needs a C compiler"
	@echo "make lint       check style and formatting"
	@echo "make format     apply both"
	@echo "make types      check types"
	@echo "make build      build sdist and wheel, and check the wheel"
	@echo "make clean      remove what these targets made, .venv included"

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "Python 3.11 or newer is needed, and $(PYTHON) is not: set PYTHON=..." >&2; exit 1; }
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed-%: pyproject.toml $(VENV)/.created
	@echo "installing into $(VENV), extra: $*"
	@$(PIP) install --editable '.[$*]'
	@touch $@

# mpi4jax is built by the mpicc of the mpich wheel, so that comes first. The tests need no CUDA, and
# an nvcc on the PATH without the headers of CUDA would end the build: an empty folder hides it.
$(VENV)/.installed-mpi: pyproject.toml $(VENV)/.installed-test
	@echo "installing into $(VENV), extra: mpi (this builds mpi4jax)"
	@mkdir -p $(VENV)/no-cuda
	@$(PIP) install 'mpich>=4.1'
	@PATH="$(abspath $(BIN)):$$PATH" CUDA_ROOT=$(abspath $(VENV))/no-cuda \
	    $(PIP) install --editable '.[mpi]'
	@touch $@

demo: $(VENV)/.installed-examples
	$(BIN)/python examples/train_digits.py $(ARGS)

test: $(VENV)/.installed-test
	$(FAST_COMPILE) $(PYTEST) -m "not slow" $(ARGS)

test-slow: $(VENV)/.installed-test
	$(PYTEST) -m slow $(ARGS)

test-mpi: $(VENV)/.installed-mpi
	$(FAST_COMPILE) $(CACHE) $(BIN)/python -m pytest tests/mpi $(ARGS)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.installed-test
	$(BIN)/pyright --pythonpath $(BIN)/python

build: $(VENV)/.installed-test
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python tools/check_wheel.py dist

clean:
	rm -rf $(VENV) dist .cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
