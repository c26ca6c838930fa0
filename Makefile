# `make up`, `make test` on a fresh Debian machine with Python >= 3.11: each makes .venv and installs what it needs.

PYTHON ?= $(firstword $(foreach name,python3.11 python3 python3.12 python3.13,$(shell \
	$(name) -c 'import sys, venv, ensurepip; sys.version_info >= (3, 11) and print("$(name)")' 2>/dev/null)))
BIN := .venv/bin
STAMP := .venv/.installed
# A CPU-only torch where there is no GPU, unless pip was told where to look.
TORCH_INDEX := $(if $(shell command -v nvidia-smi)$(PIP_FIND_LINKS)$(PIP_INDEX_URL)$(PIP_EXTRA_INDEX_URL),, \
	--extra-index-url https://download.pytorch.org/whl/cpu)

# Test files that run at once; most of their time goes into waiting for processes.
JOBS ?= 2

.PHONY: up test test-all test-clients compose-test bench-clients check smoke clean

up: $(STAMP)
	exec $(BIN)/shoal up

test: $(STAMP)
	$(BIN)/python -m pytest -m 'not full and not compose and not clients' -n $(JOBS) --dist loadfile

test-all: $(STAMP)
	$(BIN)/python -m pytest -m 'not compose and not clients' -n $(JOBS) --dist loadfile

# Needs a Docker engine with compose; without an image registry, first: tests/compose/stand_ins/build > .env
compose-test: $(STAMP)
	$(BIN)/python -m pytest -m compose -s -v tests/compose

# Client libraries and lm-eval against our stack with the real small model, each in an environment of its own, made on
# first use.
test-clients: $(STAMP)
	$(if $(TORCH_INDEX),PIP_EXTRA_INDEX_URL=$(lastword $(TORCH_INDEX))) $(BIN)/python -m pytest -m clients -v tests/clients

# guidellm and aiperf against our stack, each in an environment of its own, made on first use.
bench-clients: $(STAMP)
	$(BIN)/shoal bench clients --install

smoke: $(STAMP)
	$(BIN)/shoal smoke

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m proto.gen --check
	@git ls-files -co --exclude-standard '*.py' | grep -v _pb2 | xargs wc -l | awk \
		'$$2 != "total" && $$1 > 400 {print $$2 ": " $$1 " lines, the limit is 400"; bad = 1} END {exit bad}'

clean:
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "make: needs Python >= 3.11 with venv (Debian: apt-get install python3-venv)" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet torch $(TORCH_INDEX) -c constraints.txt
	$(BIN)/python -m pip install --quiet -e '.[dev]' -c constraints.txt
	touch $@
