# `make demo` and `make test` need Python 3.10+, make and a network on the first run; nothing else.
# Override on the command line: PYTHON=python3.12  VENV=/some/where  TORCH=torch (any build; the default is a fixed release)
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo test check lab lab-arm bench chaos convergence demo-motrix docs dist clean help

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

check: $(VENV)/.installed  ## Static checks
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

clean:  ## Remove build products (not the virtual environment)
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
