# SPDX-License-Identifier: Apache-2.0
# Each target does what it needs first: `make serve` and `make test` work on a fresh clone.
PYTHON ?=
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.cedar-setup

SERVE_ARGS ?=
TEST_ARGS  ?=

.PHONY: setup serve test bench lint format clean
.DEFAULT_GOAL := help

help: ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 10

define SETUP
PYTHON="$(PYTHON)" VENV="$(VENV)" bash scripts/setup.sh
@touch $(STAMP)
endef

setup: ## virtual environment, dependencies, protocol code, kernel library
	$(SETUP)

# The script sees for itself which of its steps have something to do.
$(STAMP): pyproject.toml setup.py client/pyproject.toml requirements/constraints.txt protos/cedar/v1/engine.proto \
  scripts/setup.sh scripts/build_protos.py scripts/build_kernels.py $(shell find backend/kernels)
	$(SETUP)

serve: $(STAMP) ## tritonserver with the engine, in the foreground: MODEL=dir HTTP_PORT= GRPC_PORT= METRICS_PORT= SERVE_ARGS=
	exec $(BIN)/cedar serve $(if $(MODEL),--model "$(MODEL)") $(if $(HTTP_PORT),--http-port $(HTTP_PORT)) $(if $(GRPC_PORT),--grpc-port $(GRPC_PORT)) \
	  $(if $(METRICS_PORT),--metrics-port $(METRICS_PORT)) $(SERVE_ARGS)

test: $(STAMP) ## every test that needs no GPU, fast ones first: TEST_ARGS="tests/cache -x"
	VENV="$(VENV)" bash scripts/test.sh $(TEST_ARGS)

bench: $(STAMP) ## what replay and prefix hits save, in the engine; then streamed completions, measured through Triton
	$(BIN)/cedar bench --replay --output build/perf/replay_cpu.json
	$(BIN)/cedar bench --output build/perf/cpu_bench.json

lint: $(STAMP) ## ruff and mypy
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy backend/cedar client/cedar_client perf

format: $(STAMP) ## ruff format
	$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

clean: ## remove the virtual environment and build output
	rm -rf $(VENV) build dist backend/cedar/v1
