# Thin: each target says what it does in a line or two; the work is in streamer/ and tests/.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
GPU := $(wildcard /dev/nvidiactl)
RUNTIME_LOCK := requirements/$(if $(GPU),cuda,runtime).txt
PIP := $(BIN)/python -m pip --disable-pip-version-check -q install

.PHONY: run serve test check setup setup-run test-gpu bench fuzz soak install uninstall lock clean

run: setup-run  ## pull a small model, serve it, ask it once, print what happened, stop
	$(BIN)/python -m streamer demo

serve: setup-run  ## the same, and stay
	$(BIN)/python -m streamer demo --stay

test: setup  ## every test that needs no GPU
	$(BIN)/python -m pytest -n 2

check: setup  ## style, types, layers
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports

setup: $(VENV)/.dev
setup-run: $(VENV)/.run

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: $(BIN)/python $(RUNTIME_LOCK) pyproject.toml
	$(PIP) --require-hashes -r $(RUNTIME_LOCK) && $(PIP) --no-deps -e . && touch $@

$(VENV)/.dev: $(BIN)/python requirements/dev.txt pyproject.toml
	$(PIP) --require-hashes -r requirements/dev.txt && $(PIP) --no-deps -e . && touch $@ $(VENV)/.run

test-gpu: setup  ## the tests that need an NVIDIA GPU; leaves a record in benchmarks/results/
	$(BIN)/python -m pytest -m cuda tests/cuda

bench: setup-run  ## the load benchmark on this machine
	$(BIN)/python -m streamer bench load

soak: setup-run  ## an hour's mixed load on the host device; leaves a record in benchmarks/results/
	$(BIN)/python benchmarks/soak.py

install:  ## as root: the command, the systemd units (PREFIX, DESTDIR, PYTHON)
	deploy/install.sh

uninstall:  ## as root: stop the units, remove what install has put there
	deploy/uninstall.sh

fuzz: setup  ## ten minutes of coverage-guided fuzzing
	$(BIN)/python -m pip -q install atheris==3.0.0 && $(BIN)/python tests/fuzz/run.py --seconds 600

lock: setup  ## write requirements/*.txt anew from pyproject.toml
	$(PIP) uv && for extra in runtime cuda dev; do $(BIN)/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-header --no-annotate $$([ $$extra = runtime ] || echo --extra $$extra) pyproject.toml -o requirements/$$extra.txt; done

clean:
	rm -rf $(VENV) build *.egg-info
