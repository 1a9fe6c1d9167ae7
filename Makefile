# `make demo` and `make test` set up all that they need; both are quick the second time.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: demo test test-slow test-compat lint format clean

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

# transformers releases that the tests marked `compat` run on; the main environment has the newest.
OLDEST := 5.10.4
COMPAT := $(OLDEST) 5.17.0

# What the installed package is made from: a change here installs it anew.
PACKAGED := pyproject.toml setup.py MANIFEST.in offload/version.py \
    $(shell find offload -path '*csrc*' -not -name '*.o')
NATIVE = $(shell find offload tests \( -name '*.cpp' -o -name '*.hpp' -o -name '*.h' \
    -o -name '*.cu' -o -name '*.cuh' \))

DEMO_PROMPT ?= Explain in two sentences why the sky is blue.
DEMO_BUDGET ?= cpu=130MB

demo: $(VENV)/.demo
	@model=$$($(BIN)/python scripts/demo_model.py); \
	set -x; \
	$(BIN)/python -m offload run "$$model" --device-map nvme --max-memory $(DEMO_BUDGET) \
	    --max-new-tokens 64 --prompt "$(DEMO_PROMPT)"

# The main run comes last: its summary is what a reader of the log looks for.
test: lint $(VENV)-$(OLDEST)/.ready
	$(VENV)-$(OLDEST)/bin/python -m pytest -m "compat and not slow"
	$(BIN)/python -m pytest

test-slow: $(VENV)/.test
	$(BIN)/python -m pytest -m slow

test-compat: $(COMPAT:%=$(VENV)-%/.ready) $(VENV)/.test
	for version in $(COMPAT); do $(VENV)-$$version/bin/python -m pytest -m "compat and not slow"; done
	$(BIN)/python -m pytest -m "compat and not slow"

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(if $(NATIVE),$(BIN)/clang-format --dry-run -Werror $(NATIVE))

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(if $(NATIVE),$(BIN)/clang-format -i $(NATIVE))

clean:
	rm -rf $(VENV) $(VENV)-* build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find offload tests scripts examples \( -name '*.so' -o -name _build.json \) -delete
	find offload tests scripts examples -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/.torch: scripts/make_venv.sh
	scripts/make_venv.sh $(VENV) $(PYTHON)
	touch $@

# The tests' environment holds the demo's too, so that neither sets up again after the other.
$(VENV)/.test: $(VENV)/.torch $(PACKAGED)
	$(BIN)/python -m pip install -qq -e '.[test]'
	touch $(VENV)/.demo $@

$(VENV)/.demo: $(VENV)/.torch $(PACKAGED)
	$(BIN)/python -m pip install -qq -e '.[demo]'
	touch $@

# An environment of its own for an older transformers; the package is imported from the folder, so
# that what the main environment compiled serves here too.
$(VENV)-%/.ready: scripts/make_venv.sh Makefile
	scripts/make_venv.sh $(VENV)-$* $(PYTHON)
	$(VENV)-$*/bin/python -m pip install -qq transformers==$* accelerate greenlet psutil \
	    hypothesis pytest pytest-timeout
	touch $@
