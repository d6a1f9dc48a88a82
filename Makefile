PYTHON ?= python3
# make test TORCH=2.15.0: on another release of torch, in an environment of its own (gigabytes, where the
# registry has no build for the host alone), and into benchmarks/results/releases.json.
TORCH :=
VENV := .venv$(if $(TORCH),-$(TORCH))
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: venv demo test test-full test-gpu lint types architecture bench

venv: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	sed '$(if $(TORCH),s/^torch==.*/torch==$(TORCH)/)' constraints.txt > $(VENV)/constraints.txt
	$(BIN)/python -m pip install -q -c $(VENV)/constraints.txt -e '.[hf,dev]'
	touch $@

# The standard library's own sources are a text that every machine has. Three minutes on two cores.
demo: venv
	mkdir -p runs
	$(BIN)/stepgraph train --model llama-tiny \
		--text "$$($(BIN)/python -c 'import os; print(os.path.dirname(os.__file__))')" \
		--ranks 2 --plan zero3 --lowering inductor --steps 400 --batch-per-rank 2 --seq 128 \
		--max-grad-norm 1 --metrics runs/demo.jsonl --sample 300

TESTS := $(BIN)/pytest -n 2 --dist loadgroup -m "not slow" --durations 25

ifdef TORCH
test: venv
	PATH="$(CURDIR)/$(BIN):$$PATH" $(TESTS) --junitxml=$(VENV)/tests.xml; failed=$$?; \
		$(BIN)/python benchmarks/releases.py $(VENV)/tests.xml; exit $$failed
else
test: venv
	$(TESTS)
endif

# On a machine with one GPU and its 16 cores, most of which compile; into benchmarks/results/one_gpu*.json and
# cuda_graph_checks.json.
test-gpu: venv
	$(BIN)/pytest -q -n 8 -p no:benchmark tests/gpu

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
