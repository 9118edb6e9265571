# `make demo` and `make test` need Python 3.10+, make and a network on the first run; nothing else.
# Override on the command line: PYTHON=python3.12  VENV=/some/where  TORCH=torch (any build; the default is a fixed release)
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo test chaos check lab lab-arm bench scaling inference convergence acceptance demo-motrix docs dist clean help

help:  ## Show this list
	@grep -E '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed 's/:.*## /\t/' | expand -t 16

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "numa_collectors needs Python 3.10 or newer, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)

# torch comes first and stays as it is: left to a dependency, another build of it could replace it.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(PIP) install --quiet "$(TORCH)"
	$(PIP) freeze | grep -i '^torch==' > $(VENV)/constraints.txt
	$(PIP) install --quiet --constraint $(VENV)/constraints.txt --editable ".[examples,dev]"
	touch $@

demo: $(VENV)/.installed  ## Train FastSAC with two collectors on a MuJoCo task; learning curve, TensorBoard, placement
	$(BIN)/python -m examples.fastsac.train

test: $(VENV)/.installed  ## Run the whole test suite (lab tests skip, saying why, where qemu or a kernel is missing)
	$(BIN)/python -m pytest

# The suite has a short form.  CHAOS_SEED=n makes other runs; a failure names the seed of its own.
CHAOS_KILLS ?= 300
CHAOS_SEED ?= 0
chaos: $(VENV)/.installed  ## Kill workers at random points of random runs, at least CHAOS_KILLS (300) times
	CHAOS_KILLS=$(CHAOS_KILLS) CHAOS_SEED=$(CHAOS_SEED) $(BIN)/python -m pytest tests/chaos -q -s -o faulthandler_timeout=0

check: $(VENV)/.installed  ## Static checks
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

lab: $(VENV)/.installed  ## Placement tests on emulated kernels with several NUMA nodes (needs qemu; tests/lab/README.md)
	$(BIN)/python tests/lab all -j 2

lab-arm: $(VENV)/.installed  ## The same on one aarch64 kernel with two nodes
	$(BIN)/python tests/lab run 2n-arm

bench: $(VENV)/.installed  ## Ratios of transport and discovery, side by side, with this machine's facts (quiet machine!)
	$(BIN)/python -m benchmarks.transport
	$(BIN)/python -m benchmarks.discovery

# Stable-Baselines3 and TorchRL are measured beside the library, and are no dependency of it.
BENCH_VENV ?= .venv-bench
BENCH := $(BENCH_VENV)/bin
$(BENCH_VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH)/python -m pip --disable-pip-version-check install --quiet "$(TORCH)"
	$(BENCH)/python -m pip freeze | grep -i '^torch==' > $(BENCH_VENV)/constraints.txt
	$(BENCH)/python -m pip --disable-pip-version-check install --quiet --constraint $(BENCH_VENV)/constraints.txt \
	  --editable ".[benchmarks]"
	touch $@

scaling: $(BENCH_VENV)/.installed  ## 1, 2, 4 and N collectors, bound and unbound, beside Gymnasium, SB3 and TorchRL (quiet machine!)
	$(BENCH)/python -m benchmarks.scaling --env HalfCheetah-v5
	$(BENCH)/python -m benchmarks.scaling --env Pendulum-v1

inference: $(VENV)/.installed  ## Where collectors should infer: N x CPU against N x CUDA
	$(BIN)/python -m benchmarks.collector_inference

docs: $(VENV)/.installed  ## Write the generated pages of docs/ again
	$(BIN)/python docs/build.py

dist: $(VENV)/.installed  ## Build the wheel and the source distribution
	$(BIN)/python -m build

# motrix pins its dependencies exactly, so it gets an environment of its own.  MuJoCo is for the benchmarks beside it.
MOTRIX_VENV ?= .venv-motrix
MOTRIX := $(MOTRIX_VENV)/bin
$(MOTRIX_VENV)/.installed: pyproject.toml examples/motrix_fastsac/pyproject.toml
	$(PYTHON) -m venv $(MOTRIX_VENV)
	$(MOTRIX)/python -m pip --disable-pip-version-check install --quiet "$(TORCH)"
	$(MOTRIX)/python -m pip freeze | grep -i '^torch==' > $(MOTRIX_VENV)/constraints.txt
	$(MOTRIX)/python -m pip --disable-pip-version-check install --quiet --constraint $(MOTRIX_VENV)/constraints.txt \
	  --editable ".[examples]" --editable examples/motrix_fastsac pytest pytest-timeout
	touch $@

demo-motrix: $(MOTRIX_VENV)/.installed  ## Train motrix's FastSAC on a motrixsim task with two collectors (own environment)
	cd examples/motrix_fastsac && OMP_NUM_THREADS=1 $(abspath $(MOTRIX))/mxlab train task=pendulum-ms/numa.fastsac \
	  algo.trainer.async_options.num_collectors=2

convergence: $(MOTRIX_VENV)/.installed  ## Synchronous against two collectors, five seeds each; writes docs/convergence.md
	$(MOTRIX)/python -m benchmarks.convergence

acceptance: $(MOTRIX_VENV)/.installed  ## One collector against two, and against motrix's own trainer
	$(MOTRIX)/python -m benchmarks.acceptance

clean:  ## Remove build products (not the virtual environment)
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
