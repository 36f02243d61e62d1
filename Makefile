# The commands that the README, CI and people use alike. Each works as the first one ever typed.
#   make serve ARGS="--port 9000 -- --port 9100"     make test ARGS="-k doctor"

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: help setup serve test check format bench

help:
	@echo "make serve   serve the shipped model on 127.0.0.1:8000 (OpenAI-compatible) and the policies on 8100"
	@echo "make test    run the tests"
	@echo "make check   lint, formatting, types, imports between the rooms"
	@echo "make format  rewrite the files as check wants them"
	@echo "make bench   run the benchmarks of this machine's build and keep their results"
	@echo "make setup   make .venv and install everything (the others do it when needed)"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints/cpu.txt scripts/install.py
	@$(PYTHON) scripts/install.py

serve: setup
	@$(BIN)/python scripts/serve.py $(ARGS)

test: setup
	@$(BIN)/pytest $(ARGS)

check: setup
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/pyright
	@$(BIN)/lint-imports

format: setup
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

bench: setup
	@$(BIN)/python benchmarks/llm/throughput.py $(ARGS)
	@$(BIN)/python benchmarks/llm/startup.py $(ARGS)
	@$(BIN)/python benchmarks/rl/recipes.py fetch-reach
	@$(BIN)/python benchmarks/rl/training_speed.py
	@$(BIN)/python benchmarks/rl/activation_memory.py
	@$(BIN)/python benchmarks/rl/export.py
	@$(BIN)/python benchmarks/rl/inference_precision.py
	@$(BIN)/python benchmarks/policy/protocols.py
	@$(BIN)/python benchmarks/policy/fuzz.py
	@$(BIN)/python benchmarks/policy/soak.py
