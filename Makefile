# Every target sets up what it needs: a machine with Python 3.11 to 3.13, make and a C compiler is enough.
# Settings: PYTHON=python3.12 picks the interpreter, ENGINE=gpu installs vLLM and torch for CUDA instead of CPU,
# VENV=dir puts the environment elsewhere.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
# An engine's start reads thousands of modules; without their bytecode on disk each start would compile them anew.
unexport PYTHONDONTWRITEBYTECODE

ENGINE ?= cpu
VENV ?= .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$python && break; \
	done)
INSTALLED := $(VENV)/.installed-$(ENGINE)
BENCH_INSTALLED := $(VENV)/.installed-bench

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | while IFS=$$'\t' read -r target what; do \
		printf '  make %-16s %s\n' "$$target" "$$what"; done

.PHONY: install
install: $(INSTALLED) ## create the environment in .venv (the other targets do it by themselves)

# The environment is made again from nothing when its interpreter is gone, and brought up to date when pyproject.toml changes.
$(INSTALLED): pyproject.toml .ci/install.py
	@test -n "$(PYTHON)" || { echo "PlexRL needs Python 3.11, 3.12 or 3.13, and none was found. Install one, or say: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(BIN)/python -c '' 2>/dev/null || { rm -rf $(VENV); $(PYTHON) -m venv $(VENV) || \
		{ echo "$(PYTHON) cannot make a virtual environment. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }; }
	@$(BIN)/python .ci/install.py controller,worker,$(ENGINE),waiting,examples,dev
	@touch $@

$(BENCH_INSTALLED): $(INSTALLED)
	@$(BIN)/python .ci/install.py controller,worker,$(ENGINE),waiting,examples,dev,bench
	@touch $@

.PHONY: demo
demo: $(INSTALLED) ## two RLVR jobs learn on one worker; what sharing saved, in a table and a picture (10 minutes)
	@$(BIN)/plexrl demo --out out/demo

.PHONY: demo-smollm2
demo-smollm2: $(INSTALLED) ## the same with a real pretrained LLM, SmolLM2-135M (25 minutes)
	@$(BIN)/plexrl demo --smollm2 --out out/demo-smollm2

.PHONY: test
test: $(INSTALLED) ## all tests, the quick ones first, two files at a time
	@$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: test-unit
test-unit: $(INSTALLED) ## the unit tests alone (seconds)
	@$(BIN)/python -m pytest -q tests/unit

SEEDS ?= 10000

.PHONY: test-long
test-long: $(INSTALLED) ## the tests that take minutes each: real engines killed in mid-training, learning to wait
	@$(BIN)/python -m pytest -q -m long

.PHONY: simulate-faults
simulate-faults: $(INSTALLED) ## the controller in a simulated world that fails, SEEDS=10000 seeds (20 minutes on 2 cores)
	@PYTHONPATH=. $(BIN)/python -m tests.simulation.faults --seeds $(SEEDS)

.PHONY: promises
promises: $(INSTALLED) ## break the code in one place at a time and see each promise's test notice (QUICK=1: without real engines)
	@PYTHONPATH=. $(BIN)/python -m tests.promises $(if $(QUICK),--quick)

.PHONY: fuzz
fuzz: $(INSTALLED) ## MESSAGES=10000 bad messages to the controller, a quarter to a worker: a declared status, the next good one works
	@FUZZ_MESSAGES=$(or $(MESSAGES),10000) $(BIN)/python -m pytest -q -o timeout=3600 tests/component/test_fuzz.py \
		tests/component/test_fuzz_worker.py

.PHONY: lint
lint: $(INSTALLED) ## ruff, mypy --strict, import contracts, buf lint
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --check --quiet || { echo "make format puts these right:"; $(BIN)/ruff format --check; }
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports --no-logo --no-cache > $(VENV)/lint-imports.log || { cat $(VENV)/lint-imports.log; exit 1; }
	@PATH="$(abspath $(BIN)):$$PATH" .ci/lint-protos
	@echo "lint: clean"

.PHONY: format
format: $(INSTALLED) ## put the code in the house format
	@$(BIN)/ruff check --quiet --fix
	@$(BIN)/ruff format --quiet

.PHONY: proto
proto: $(INSTALLED) ## write client/plexrl/v1 from protos/ again
	@PATH="$(abspath $(BIN)):$$PATH" .ci/generate-stubs client

.PHONY: kills
kills: $(INSTALLED) ## kill -9 the worker 20 times under one training run on the real engine; what each cost (15 minutes)
	@PLEXRL_KILLS=$${PLEXRL_KILLS:-20} $(BIN)/python -m pytest -q -s -m long --timeout 3600 tests/e2e/test_replay.py

.PHONY: bench-tails
bench-tails: $(INSTALLED) ## what consolidated tails give two jobs on two workers with the real engine (5 minutes)
	@$(BIN)/python -m benchmarks.tails --out out/bench-tails

.PHONY: bench-snapshots
bench-snapshots: $(INSTALLED) ## what snapshots of a 25M-parameter model every 30 s cost a training run (15 minutes)
	@$(BIN)/python -m benchmarks.snapshots --out out/bench-snapshots

.PHONY: bench
bench: $(BENCH_INSTALLED) ## time a durable call without work beside Ray, Celery, Dramatiq, procrastinate; payloads (5 minutes)
	@$(BIN)/python -m benchmarks --out out/bench

.PHONY: load
load: $(INSTALLED) ## 2,000 calls in flight with twenty 64 MB payloads among them; heartbeats and other jobs keep their time
	@PLEXRL_LOAD_LARGE_CALLS=20 $(BIN)/python -m pytest -q -s -o timeout=900 tests/fault/test_load.py

.PHONY: faults
faults: $(INSTALLED) ## kill -9 of every part at every named point, and KILLS=10 times at random; what each cost (70 minutes; POINTS=session CELLS=0:15: some alone)
	@PLEXRL_FAULT_KILLS=$(or $(KILLS),10) PLEXRL_FAULT_CELLS=$(or $(CELLS),:) PLEXRL_FAULT_POINTS="$(POINTS)" $(BIN)/python -m pytest -q -s -m fault tests/fault

.PHONY: bench-decisions
bench-decisions: $(INSTALLED) ## time scheduling decisions up to 10,000 GPUs (half a minute)
	@$(BIN)/python -m benchmarks.decisions --out out/bench-decisions

.PHONY: plexbench
plexbench: $(INSTALLED) ## the scheduler beside its baselines, in simulation: tables and checks (3 minutes)
	@$(BIN)/python -m plexrl_controller.simulation.plexbench --size ci --out out/plexbench

.PHONY: plexbench-docs
plexbench-docs: $(INSTALLED) ## the same, and docs/plexbench.md written again
	@$(BIN)/python -m plexrl_controller.simulation.plexbench --size ci --out out/plexbench --docs docs/plexbench.md

.PHONY: plexbench-full
plexbench-full: $(INSTALLED) ## every load and all scales up to 10,000 GPUs (half an hour)
	@$(BIN)/python -m plexrl_controller.simulation.plexbench --size full --out out/plexbench --docs docs/plexbench-full.md

.PHONY: live-vs-simulated
live-vs-simulated: $(INSTALLED) ## three real jobs on one real worker: the simulator foretells each one's slowdown (5 minutes)
	@$(BIN)/python -m benchmarks.live_vs_simulated --out out/live-vs-simulated

.PHONY: bench-swap
bench-swap: $(INSTALLED) ## time swaps: host tier beside memcpy, first token with and without prefetch (3 minutes)
	@OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=0 $(BIN)/python -m benchmarks.swap --out out/bench-swap

.PHONY: bench-waiting-bridge
bench-waiting-bridge: $(INSTALLED) ## agents' sleeps as idle hints: on, off and wrong, live and simulated (45 minutes; ENGINE_OF=vllm: the real engine)
	@$(BIN)/python -m benchmarks.bridge --engine $(or $(ENGINE_OF),fake) --out out/bench-waiting-bridge

.PHONY: bench-waiting-learned
bench-waiting-learned: $(INSTALLED) ## learning to wait, three seeds one after the other: each within 15 % of the floor in 10 minutes
	@$(BIN)/plexrl waiting learn --alone --out out/bench-waiting-learned

.PHONY: soak
soak: $(INSTALLED) ## memory of a worker's processes over 30 minutes, 200 swaps and 2,000 calls at least
	@$(BIN)/python -m benchmarks.soak --out out/soak

.PHONY: clean
clean: ## remove the environment, caches and reports (not .plexrl, the data of `plexrl up`)
	@rm -rf $(VENV) out .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
