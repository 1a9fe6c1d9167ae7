# `make demo` and `make test` set up all that they need; both are quick the second time.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.NOTPARALLEL:
.DELETE_ON_ERROR:
# Packages are compiled at their first import (see make_venv.sh), which Python has to keep: a test
# that starts a process would else compile them all again.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: demo test test-slow test-compat lint format clean

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
WORKERS ?= 2
PYTEST := python -m pytest -n $(WORKERS) --dist worksteal

# Where there is no GPU the kernels are compiled to be checked, not to be run (see setup.py).
KERNELS := $(if $(wildcard /dev/nvidiactl /dev/dxg),run,check)
TEST := $(VENV)/.test-$(KERNELS)
DEMO := $(VENV)/.demo-$(KERNELS)
INSTALL := $(if $(filter check,$(KERNELS)),OFFLOAD_CHECK_KERNELS=1 )$(BIN)/python -m pip install -qq --no-compile

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

demo: $(DEMO)
	@model=$$($(BIN)/python scripts/demo_model.py); \
	set -x; \
	$(BIN)/python -m offload run "$$model" --device-map nvme --max-memory $(DEMO_BUDGET) \
	    --max-new-tokens 64 --prompt "$(DEMO_PROMPT)"

# The main run comes last: its summary is what a reader of the log looks for.
test: lint $(VENV)-$(OLDEST)/.ready
	$(VENV)-$(OLDEST)/bin/$(PYTEST) -m "compat and not slow"
	$(BIN)/$(PYTEST)

test-slow: $(TEST)
	$(BIN)/python -m pytest -m slow

test-compat: $(COMPAT:%=$(VENV)-%/.ready) $(TEST)
	for version in $(COMPAT); do $(VENV)-$$version/bin/$(PYTEST) -m "compat and not slow"; done
	$(BIN)/$(PYTEST) -m "compat and not slow"

lint: $(TEST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(if $(NATIVE),$(BIN)/clang-format --dry-run -Werror $(NATIVE))

format: $(TEST)
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
$(TEST): $(VENV)/.torch $(PACKAGED)
	$(INSTALL) -e '.[test]'
	touch $(DEMO) $@

$(DEMO): $(VENV)/.torch $(PACKAGED)
	$(INSTALL) -e '.[demo]'
	touch $@

# An older transformers, and what it needs of another release than the main environment has; all
# else is found there. The package is imported from the folder.
$(VENV)-%/.ready: Makefile | $(TEST)
	$(BIN)/python -m venv --clear --without-pip $(VENV)-$*
	packages() { "$$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }; \
	packages $(BIN)/python > "$$(packages $(VENV)-$*/bin/python)/main.pth"
	$(VENV)-$*/bin/python -m pip install -qq --no-compile transformers==$*
	touch $@
