# `make serve` and `make test` do everything on a fresh machine; each target sets up what it needs.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
# A machine with an NVIDIA driver gets torch's CUDA build; any other gets the CPU build.
CONSTRAINTS ?= $(if $(shell command -v nvidia-smi 2>/dev/null),constraints-gpu.txt,constraints.txt)
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Test workers: one more than cores, because two of them mostly wait for Ray. Each loads torch.
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min((os.cpu_count() or 1) + 1, 4))')
ARGS ?=
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# pip says "conflicting dependencies" when it cannot reach the index, and does not name the index.
NO_TORCH := Could not install torch with $(CONSTRAINTS)$(if $(filter constraints.txt,$(CONSTRAINTS)),. If you cannot \
reach download.pytorch.org: make CONSTRAINTS=constraints-gpu.txt $(MAKECMDGOALS) (3 GB more disk))

# Dozens of Python processes load this code: each would compile it again, and each worker would rewrite all tests.
export PYTHONDONTWRITEBYTECODE :=

# `make serve port=8001` would only set a variable of make's. Ours are in capitals.
LETTERS := a b c d e f g h i j k l m n o p q r s t u v w x y z
NAMES := $(sort $(filter $(addsuffix %,$(LETTERS)),$(.VARIABLES)))
GIVEN := $(strip $(foreach name,$(NAMES),$(if $(filter command,$(origin $(name))),$(name)=$(value $(name)))))
$(if $(GIVEN),$(error options go in ARGS; write: make $(or $(MAKECMDGOALS),serve) ARGS="$(GIVEN)"))

ifeq ($(sort $(MAKECMDGOALS)),check test)
MAKEFLAGS += --jobs=2  # type-checking takes one core, and the tests seldom fill all
endif

.PHONY: help serve test check faults loadtest bench clients clean

help:  ## Show the targets.
	@grep -hE '^[a-z.]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(READY): pyproject.toml constraints.txt constraints-gpu.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"Quire needs Python 3.11 or newer, but $(PYTHON) is {v.major}.{v.minor}; try: make PYTHON=python3.11 $(MAKECMDGOALS)")'
	@# $(READY) holds what was set up: files that are merely newer, as after a checkout, change nothing.
	@# torch comes first, from the index that its constraints name; then everything else needs no second index.
	@if cat $^ | cmp -s - $(READY); then touch $(READY); exit; fi; \
	if [ -e $(READY) ]; then echo "Updating $(VENV): what it needs has changed"; \
	else echo "Setting up $(VENV) with $(CONSTRAINTS): a few minutes, once"; $(PYTHON) -m venv $(VENV); fi; \
	set -x; \
	$(PIP) --retries 2 -c $(CONSTRAINTS) torch setuptools || { { set +x; } 2>/dev/null; echo '$(NO_TORCH)' >&2; exit 1; }; \
	$(PIP) -c constraints-gpu.txt --no-build-isolation -e '.[dev]'; \
	cat $^ > $(READY)

.venv: $(READY)  ## Set up the environment (other targets do this automatically).

serve: $(READY)  ## Serve the built-in model on http://127.0.0.1:8000 (options: make serve ARGS="model=... port=...").
	@$(BIN)/python -m app $(ARGS)

test: $(READY)  ## Run all tests, in parallel, in a random order that ARGS="--randomly-seed=N" repeats.
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder $(ARGS)

check: $(READY)  ## Lint and type-check; `make check test` runs both at once.
	@report=$$( { $(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy; } 2>&1 ) && failed=0 || failed=$$?; \
	printf '\ncheck: %s\n' "$$([ $$failed = 0 ] && echo passed || echo FAILED)"; printf '%s\n' "$$report"; exit $$failed

faults: $(READY)  ## Plant faults in copies of the code; the file's unit tests must catch 95% of them (ARGS="--only WORDS").
	$(BIN)/python -m tests.planted_faults $(ARGS)

loadtest: $(READY)  ## Run a minute of traffic with up to 16 users; writes loadtests/reports/loadtest.html, with plots.
	$(BIN)/python -m loadtests.locust_run $(ARGS)

bench: $(READY)  ## Run every benchmark with its checks; it first says how long that takes (some: make bench ARGS="--only kernels memory").
	$(BIN)/python -m loadtests.bench $(ARGS)

clients: $(READY)  ## Run third-party clients, each in its own environment, against a server; writes docs/clients.md.
	$(BIN)/python -m clients.run $(ARGS)

clean:  ## Remove the environment, caches and reports (keeps the model cache in your home directory).
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis loadtests/reports
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
