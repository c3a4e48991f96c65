# Every recipe is a line that one can read and type. The environment is made on first use and
# again when pyproject.toml changes.

# PyPI's torch for Linux brings CUDA packages of several GB. Where a CPU build is to be had, naming
# this version takes it; with a GPU, `make TORCH='torch>=2.11,<2.16' ...` takes the newest.
TORCH ?= torch==2.13.0
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready

.PHONY: help setup demo test test-gpu soak check bench docs clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

setup: $(READY)  ## make .venv with everything (about two minutes)

$(READY): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet '$(TORCH)'
	$(PY) -m pip install --quiet -e '.[server,bench,dev]'
	touch $@

demo: $(READY)  ## serve the shipped model, ask it, measure it against transformers (no GPU needed)
	$(PY) -m metainfer.cli.demo

test: $(READY)  ## all tests that need no GPU, on two cores
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder tests/cpu tests/pure

test-gpu: $(READY)  ## the tests that need a GPU (CODE=sm_89: with the code of that card)
	$(PY) -m pytest tests/gpu $(if $(CODE),--as $(CODE))

soak: $(READY)  ## compile every attention kernel for every model, layout and card; kill ranks (hours)
	for model in deepseek-v4-flash deepseek-v4.1-flash deepseek-v3.2 glm-5.3; do \
	  $(PY) -m metainfer kernels coverage $$model --tensor-parallel-size 1 4 8 --part attention || exit 1; \
	done
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadfile -m soak tests/cpu
	OMP_NUM_THREADS=1 $(PY) -m pytest -m soak tests/compiled
	OMP_NUM_THREADS=1 $(PY) -m pytest tests/soak
	OMP_NUM_THREADS=1 $(PY) -m pytest tests/cpu/test_ranks_restarts.py -k random_moments --kills 500 --timeout 20000

check: $(READY)  ## lint, format, types, layers, generated docs
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports --no-logo
	$(PY) -m metainfer.cli.docs --check

bench: $(READY)  ## this engine against transformers, record in results/
	$(PY) -m metainfer bench model --save-result --result-dir results

docs: $(READY)  ## write docs/reference/ from the code
	$(PY) -m metainfer.cli.docs

clean:  ## remove the environment, caches and results
	rm -rf $(VENV) results build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -not -path './.git/*' -exec rm -rf {} +
