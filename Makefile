# One word does the whole job: every target makes what it needs first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
WHEELS ?=

.DEFAULT_GOAL := help
.PHONY: help setup run test test-all test-browser lint lab bench gpu-check

help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed 's/:.*## /\t/' | awk -F'\t' '{printf "  make %-10s %s\n", $$1, $$2}'

setup: $(READY)  ## build .venv (done by the others when it is missing or out of date)

run: $(READY)  ## execute every notebook, results in outputs/
	$(BIN)/fsdp-ema run

# Two files at a time, in the order of their names: the long ones do not come last.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder

test: $(READY) lint  ## lint, types and the tests, JupyterLab in a browser included; a quarter of an hour
	$(PYTEST) $(PARALLEL) -m "not slow"

test-all: $(READY) lint  ## the same, then the full products of the test axes
	$(PYTEST) $(PARALLEL) -m "not slow"
	$(PYTEST) -n 2 --dist worksteal -m slow

test-browser: $(READY)  ## the browser's tests alone: every notebook and explorer in JupyterLab, in Chromium
	$(PYTEST) -m "browser and not slow" tests/browser

lint: $(READY)  ## style of code and notebooks, types of the core
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Jupyter does not start as root unless it is told to, and a container has no other user.
lab: $(READY)  ## open JupyterLab on the notebooks
	$(BIN)/jupyter lab --notebook-dir=notebooks $(if $(filter 0,$(shell id -u)),--allow-root)

# timm without its dependencies: its torchvision may replace torch, and its average needs torch alone.
bench: $(READY)  ## time and memory of updates, checkpoints, starts and sliders; JSON in outputs/bench
	$(PIP) install -c constraints.txt -e '.[lab,bench]'
	$(PIP) install -c constraints.txt --no-deps timm
	@status=0; for name in update checkpoint start slider; do $(BIN)/python benchmarks/bench_$$name.py || status=1; done; exit $$status

gpu-check:  ## gpu tests and every notebook on CUDA under PYTHON; WHEELS=folder brings what it lacks
	$(PYTHON) scripts/gpu_check.py $(if $(WHEELS),--wheels "$(WHEELS)")

# The stamp is written last, so that a set-up that was broken off does not count as one; what it left is made anew, while
# a .venv that is only out of date is brought up to date.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) scripts/check_python.py
	@rm -f $@
	@echo "setting up $(VENV) (a few minutes the first time)"
	@test ! -e $(VENV)/.installing && $(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@touch $(VENV)/.installing
	@# torch first and alone: whichever build of it is at hand settles the rest.
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt -e '.[lab,test]'
	@rm $(VENV)/.installing
	@touch $@
