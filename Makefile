# Each target is one command; `make lab` and `make test` are the two that matter.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
STAMP := .venv/.installed
PYTEST := $(BIN)/python -m pytest

.PHONY: lab test check model bench

lab: model            ## checks, three steps on V1 and V2, then JupyterLab (the URL is the last line)
	$(BIN)/runnerscope doctor
	$(BIN)/runnerscope step --runner both
	$(BIN)/runnerscope lab

test: model           ## everything: unit and parity tests, then the browser's, then the notebooks
	OMP_NUM_THREADS=1 $(PYTEST) -n 2 --dist loadfile -m "not browser" tests
	$(PYTEST) -m browser tests
	$(PYTEST) --nbval --nbval-current-env --nbval-sanitize-with notebooks/sanitize.cfg notebooks

check: $(STAMP)       ## lint, types, fast tests: under two minutes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(PYTEST) -q -n 2 -m "not slow and not browser" tests

model: $(STAMP)       ## fetches the default model into the user's cache (93 MB, once)
	$(BIN)/runnerscope model

bench: model          ## this engine against transformers' generate
	$(BIN)/runnerscope bench --peer transformers

$(STAMP): pyproject.toml constraints.txt
	@echo 'making .venv (a few minutes, once) …'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -qq -c constraints.txt -e '.[dev]'
	@touch $@
