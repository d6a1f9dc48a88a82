PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: venv demo test test-full lint types architecture bench

venv: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[hf,dev]'
	touch $@

# The standard library's own sources are a text that every machine has. Three minutes on two cores.
demo: venv
	mkdir -p runs
	$(BIN)/stepgraph train --model llama-tiny \
		--text "$$($(BIN)/python -c 'import os; print(os.path.dirname(os.__file__))')" \
		--ranks 2 --plan zero3 --lowering inductor --steps 400 --batch-per-rank 2 --seq 128 \
		--max-grad-norm 1 --metrics runs/demo.jsonl --sample 300

test: venv
	$(BIN)/pytest -n 2 --dist loadgroup -m "not slow" --durations 25

test-full: venv
	$(BIN)/pytest -n 2 --dist loadgroup

lint: venv
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: venv
	$(BIN)/pyright

architecture: venv
	$(BIN)/lint-imports
	$(BIN)/pytest -q tests/architecture

bench: venv
	set -e; for script in $(sort $(wildcard benchmarks/*.py)); do $(BIN)/python $$script; done
