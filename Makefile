# SPDX-License-Identifier: Apache-2.0
# Every target makes .venv first, when it is missing or older than what it was built from.
#
#   make demo          train the digits recipe asynchronously and write a report (a few minutes)
#   make test          the quick tests            make test-slow   the others that need no GPU
#   make lint          style, layers, types       make bench       the operators against their peers
#   make test-native   the C++ tests, with sanitizers too
#   make test-native-gpu   those of the CUDA kernels, under compute-sanitizer too (skipped without a GPU)
#   make bench-loops   whole runs: learning, overlap, hand-over, soak, parity (an hour or more)
#
#   TORCH=...          which torch to install: a requirement or the path of a wheel (default: torch==2.13.0)
#   BENCH=...          options of each operator's benchmark (default: --seconds 30; --slow-peers adds compiled ones)
#   PYTHON=...         the interpreter that .venv is made from (default: python3, 3.11 or newer)

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SOURCES := pyproject.toml $(wildcard setup.py) $(shell find csrc -type f 2>/dev/null)

# A recipe's workers are processes of one thread each; more threads than cores make everything slower.
export OMP_NUM_THREADS ?= 1

# A demo that was run before stays as it is.
DEMO_DIR := $(if $(wildcard runs/demo/metrics.jsonl),runs/demo-$(shell date +%Y%m%d-%H%M%S),runs/demo)

TEST_WORKERS ?= 2
PURE := unirl/ops unirl/types unirl/sde unirl/schedule unirl/config unirl/parity unirl/metrics \
	unirl/protocols.py unirl/rollout/async_runtime.py

OPERATORS := sibling_prefix_attention packing digest flow guidance bagel
LOOPS := digits_learning async_overlap handover schedule storage soak
BENCH ?= --seconds 30

.PHONY: help install demo test test-slow test-native test-native-gpu lint bench bench-loops clean

help:
	@sed -n 's/^#   //p' Makefile

install: $(STAMP)

$(STAMP): $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[dev,demo]"
	touch $@

demo: $(STAMP)
	$(BIN)/python -m unirl.train_async_diffusion --config-name=diffusion/digits/digits_async run_dir=$(DEMO_DIR)
	@echo "open $(DEMO_DIR)/report.html"

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow and not gpu and not vllm" -n $(TEST_WORKERS) --dist loadgroup

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m "slow and not gpu and not vllm"

# ctest beside the build with each set of sanitizers; cmake and ninja are those of the environment.
test-native: $(STAMP)
	@set -e; export PATH="$(CURDIR)/$(BIN):$$PATH"; for checks in "" address,undefined thread; do \
		folder=build/native-tests/$${checks:-plain}; \
		echo "== C++ tests, $${checks:-plain}"; \
		cmake -S csrc -B $$folder -G Ninja -DUNIRL_BUILD_EXTENSION=OFF -DUNIRL_BUILD_TESTS=ON -DUNIRL_SANITIZE=$$checks > /dev/null; \
		cmake --build $$folder | tail -n 1; \
		ctest --test-dir $$folder --output-on-failure --timeout 120 | tail -n 20; \
	done

# Runs without .venv where CMake is on PATH, so that a GPU machine needs no installation.
test-native-gpu:
	PATH="$(CURDIR)/$(BIN):$$PATH" csrc/tests/run_gpu.sh build/native-tests/gpu

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy $(PURE)

bench: $(STAMP)
	for stem in $(OPERATORS); do echo "== $$stem"; $(BIN)/python benchmarks/bench_$$stem.py $(BENCH); done

bench-loops: $(STAMP)
	for stem in $(LOOPS); do echo "== $$stem"; $(BIN)/python benchmarks/bench_$$stem.py; done
	for what in overhead bitwise; do echo "== parity $$what"; $(BIN)/python benchmarks/bench_parity.py $$what; done

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .grimp_cache
	find unirl tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
	rm -f unirl/*.so unirl/ops/*.so
