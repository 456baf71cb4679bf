# Everything runs in .venv, which the first target creates; only Python 3.11 or newer, with its
# venv module, has to be there. `test-newest` has .venv-newest, of a Python that the newest jax runs
# on. A change of pyproject.toml installs again.

PYTHON ?= python3
# Of .venv-newest, which has the newest versions; empty: the newest that tools/newest_python.py finds.
NEWEST_PYTHON ?=
# Not empty: `make test-newest` passes where no Python for the newest jax is found.
ALLOW_NO_NEWEST ?=
PYTEST_WORKERS ?= 2
ARGS ?=
# Of `make contract`; empty: the templates in docs/templates/.
SELECTOR ?=
ALLREDUCE ?=

VENV := .venv
BIN := $(VENV)/bin
PIP_OPTIONS := --disable-pip-version-check -qq
PIP := $(BIN)/python -m pip $(PIP_OPTIONS)
# .venv has the oldest versions that are supported, whatever Python it is made with.
OLDEST := constraints/oldest.txt
NEWEST := .venv-newest
# Most of a test run is compilation, so what was compiled once is kept, and the tests do without the
# optimisations of machine code and the emitters of fused loops, which take two thirds of it. What
# trains for long has them. XLA aborts at a flag it does not know, so each is tried first.
FAST_FLAGS := --xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false
# XLA ends the process if a device waits 40 seconds for the others, as on a busy machine.
PATIENT := --xla_cpu_collective_call_terminate_timeout_seconds=600
fast_compile = XLA_FLAGS="$$XLA_FLAGS $$($(1)/bin/python tools/xla_flags.py $(1)/.xla-flags \
    $(FAST_FLAGS) $(PATIENT))"
CACHE := JAX_COMPILATION_CACHE_DIR=.cache/jax JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0.1
# What depends on the surface of jax: types under shard_map, pmap, tracing, serialization, callbacks,
# barriers, what is sharded by the compiler.
NEWEST_TESTS := $(addprefix tests/,\
    test_package.py mpi/test_dispatch.py sparse_collectives/test_traffic.py \
    sparse_collectives/test_padded_coo.py \
    $(addprefix optax_ext/,test_modes.py test_train_step.py test_sharded.py test_checkpoint.py test_errors.py test_calls.py \
        test_nonfinite.py test_buckets.py test_sharded_program.py test_as_optax.py \
        test_rounds_mapped.py test_train_round.py test_explicit_axes.py test_whole.py test_around_a_step.py) \
    sparse_collectives/test_direct_messages.py sparse_collectives/test_allreduce_programs.py \
    sparse_collectives/test_several_axes.py \
    $(addprefix elastic/,test_two_workers.py test_handover.py test_checkpoints.py))
TRAININGS := tests/test_examples.py tests/test_smoke.py tests/test_training.py tests/system
# Without the last option, xdist waits forever after a process of the tests has crashed.
PYTEST := $(CACHE) $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadfile --max-worker-restart=0

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow fuzz test-newest on-newest test-mpi contract evidence gpu-check tables lint \
    format types docs build clean

help:
	@echo "make demo         train a small model, dense and sparse, and compare them (ARGS='--help')"
	@echo "make test         run the tests, without the slow ones"
	@echo "make test-slow    run the slow tests"
	@echo "make fuzz         run those of them that combine options at random; FUZZ_PARTS=100 for more"
	@echo "make test-newest  run those that depend on jax's interfaces, on the newest jax"
	@echo "make test-mpi     build mpi4jax and run the tests over MPI; needs a C compiler"
	@echo "make contract     check a selector or an allreduce of one's own (SELECTOR=file.py:factory, ALLREDUCE=...)"
	@echo "make evidence     check the claims of the papers and of README, one by one (an hour; ARGS=--quick: minutes)"
	@echo "make gpu-check    compare predicted and measured steps on your hosts (ARGS='--coordinator HOST:PORT ...')"
	@echo "make tables       write the tables of numbers of docs from docs/data"
	@echo "make lint         check style, formatting, and the language of pages and docstrings"
	@echo "make format       apply both"
	@echo "make types        check types, and that all of the public ones are known"
	@echo "make docs         build the manual into site/; a warning fails"
	@echo "make build        build sdist and wheel, and check both"
	@echo "make clean        remove what these targets made, .venv included"

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "Python 3.11 or newer is needed, and $(PYTHON) is not: set PYTHON=..." >&2; exit 1; }
	@echo "creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed-%: pyproject.toml $(OLDEST) $(VENV)/.created
	@echo "installing into $(VENV), extra: $*"
	@$(PIP) install --constraint $(OLDEST) --editable '.[$*]'
	@touch $@

# mpi4jax is built by the mpicc of the mpich wheel, so that comes first. The tests need no CUDA, and
# an nvcc on the PATH without the headers of CUDA would end the build: an empty folder hides it.
$(VENV)/.installed-mpi: pyproject.toml $(OLDEST) $(VENV)/.installed-test
	@echo "installing into $(VENV), extra: mpi (this builds mpi4jax)"
	@mkdir -p $(VENV)/no-cuda
	@$(PIP) install 'mpich>=4.1'
	@PATH="$(abspath $(BIN)):$$PATH" CUDA_ROOT=$(abspath $(VENV))/no-cuda \
	    $(PIP) install --constraint $(OLDEST) --editable '.[mpi]'
	@touch $@

$(NEWEST)/.created:
	@python=$$($(PYTHON) tools/newest_python.py $(NEWEST_PYTHON)) || exit 1; \
	    echo "creating $(NEWEST) with $$python"; "$$python" -m venv $(NEWEST)
	@touch $@

$(NEWEST)/.installed-test: pyproject.toml $(NEWEST)/.created
	@echo "installing into $(NEWEST), extra: test"
	@$(NEWEST)/bin/python -m pip $(PIP_OPTIONS) install --no-compile --upgrade --editable '.[test]'
	@touch $@

demo: $(VENV)/.installed-examples
	$(BIN)/python examples/train_digits.py $(ARGS)

test: $(VENV)/.installed-test
	$(call fast_compile,$(VENV)) $(PYTEST) -m "not slow" $(ARGS)

# With ARGS that choose all are in one command: in each of several there might be nothing.
CHOSEN = $(filter-out --one-in=%,$(ARGS))
test-slow: $(VENV)/.installed-test
	$(call fast_compile,$(VENV)) $(PYTEST) -m slow \
	    $(if $(CHOSEN),,$(addprefix --ignore=,tests/fuzz $(TRAININGS))) $(ARGS)
	$(if $(CHOSEN),,$(MAKE) --no-print-directory fuzz)
	$(if $(CHOSEN),,$(PYTEST) -m slow $(TRAININGS) $(ARGS))

fuzz: $(VENV)/.installed-test
	$(call fast_compile,$(VENV)) $(PYTEST) --dist load -m slow tests/fuzz $(ARGS)

test-newest:
	@if [ -z "$(ALLOW_NO_NEWEST)" ] || $(PYTHON) tools/newest_python.py $(NEWEST_PYTHON) >/dev/null; \
	    then $(MAKE) --no-print-directory on-newest; \
	    else echo "NOT tested on the newest jax, as ALLOW_NO_NEWEST=$(ALLOW_NO_NEWEST)"; fi

on-newest: $(NEWEST)/.installed-test
	@$(NEWEST)/bin/python -c 'import jax, sys; print("jax", jax.__version__, "on", sys.version)'
	$(call fast_compile,$(NEWEST)) $(CACHE) $(NEWEST)/bin/python -m pytest -n $(PYTEST_WORKERS) \
	    --dist loadfile --max-worker-restart=0 -m "not slow" $(NEWEST_TESTS) $(ARGS)

# A program of MPI and one of a mesh differ in which product and sum become one instruction that rounds
# once. AVX has no such instruction, so all their bits are the same.
test-mpi: export XLA_FLAGS += --xla_cpu_max_isa=AVX
test-mpi: $(VENV)/.installed-mpi
	$(call fast_compile,$(VENV)) $(CACHE) $(BIN)/python -m pytest tests/mpi $(ARGS)

contract: $(VENV)/.installed-test
	SELECTOR='$(SELECTOR)' ALLREDUCE='$(ALLREDUCE)' $(call fast_compile,$(VENV)) $(CACHE) \
	    $(BIN)/python -m pytest tests/test_templates.py $(ARGS)

# Results are kept one by one: a run that was stopped goes on. Of each program in the cache XLA would
# log a screenful, as it does not know features of the machine that it has chosen itself.
evidence: $(VENV)/.installed-test
	@TF_CPP_MIN_LOG_LEVEL=3 $(CACHE) $(BIN)/python -m benchmarks.evidence $(ARGS)

gpu-check: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks.gpu.hosts $(ARGS)

tables: $(VENV)/.installed-test
	@$(BIN)/python -m tools.tables $(ARGS)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m tools.prose

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.installed-test
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python tools/check_public_types.py

# --strict counts warnings only where they are printed, so not with --quiet.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir site
	@echo "the manual is site/index.html"

build: $(VENV)/.installed-test
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/twine check --strict dist/*
	$(call fast_compile,$(VENV)) $(BIN)/python tools/check_dist.py dist

clean:
	rm -rf $(VENV) $(NEWEST) dist site .cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
