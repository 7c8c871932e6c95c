# Two commands matter to a newcomer: `make demo` and `make test`. Everything sets itself up.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.holdfast-setup
FETCHED_STAMP := $(VENV)/.holdfast-setup-fetched
BENCH_STAMP := $(VENV)/.holdfast-setup-bench
SEEDS  ?= 1000
PYTHONS ?= $(patsubst %,python3.%,11 12 13 14) $(wildcard $(HOME)/.pyenv/versions/3.1[1-9].*/bin/python3)
# More than a small machine has cores: many tests wait for processes and time-outs, not for a core.
PYTEST_WORKERS ?= 4
# Static checks beside the tests, which wait more than they compute.
ifeq ($(MAKELEVEL),0)
MAKEFLAGS += --jobs=2
endif
PYTEST = $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadgroup

.PHONY: help setup java demo test pythons check most-tests format lint types contracts long sim chaos cluster lab bench docs requirements clean

help: ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) $(FETCHED_STAMP) ## create .venv with the command .venv/bin/holdfast, fetch what tests need beside it

$(STAMP): requirements/dev.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("holdfast needs Python 3.11 or newer, not free-threaded; this is " + sys.version) if sys.version_info < (3, 11) or "t" in sys.abiflags else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

# Java, Apache Kafka and Spark's connector: what cannot be had is named, tried again next time, and stops nothing.
# Tests are compiled here: otherwise every worker of the first run would compile every test.
$(FETCHED_STAMP): $(STAMP)
	@$(BIN)/python -m pytest --collect-only --quiet tests > /dev/null
	@if $(BIN)/python -m tests.support.fetch; then touch $@; fi

$(BENCH_STAMP): $(STAMP) requirements/bench.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements/bench.txt
	@touch $@

java: $(STAMP) ## find a Java for Spark; where there is none, install Debian's headless one if that is possible
	@$(BIN)/python -m holdfast.pipeline.java --install

demo: $(STAMP) java ## three processes are killed while orders go through; nothing is lost, and it is proven
	$(BIN)/holdfast demo

test: PYTEST_WORKERS = 6
test: setup ## the quickest guard of every rule: about five minutes on two cores
	$(PYTEST) --quick tests

pythons: ## make test on each Python that is installed, in .venv-3.12 and the like: make pythons [PYTHONS="python3.12 …"]
	@ran=; for python in $(PYTHONS); do \
	  version=$$($$python -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue; \
	  case "$$ran " in *" $$version "*) continue;; esac; \
	  echo "Python $$version"; $(MAKE) test PYTHON=$$python VENV=.venv-$$version || exit; \
	  ran="$$ran $$version"; \
	done; echo "make test passed on Python:$${ran:- none of $(PYTHONS) is installed}"; test -n "$$ran"

check: lint types contracts most-tests ## what CI runs: format, lint, types, import contracts, all but the longest tests

most-tests: setup
	$(PYTEST) tests

long: setup ## every test, those that take long as well: Java's tools, both engines everywhere, the demo's storm
	$(PYTEST) --long tests

format: $(STAMP) ## rewrite the code in the house format
	$(BIN)/ruff format src tests bench examples *.py
	$(BIN)/ruff check --fix src tests bench examples *.py

lint: $(STAMP) ## format and lint, read only
	$(BIN)/ruff format --check src tests bench examples *.py
	$(BIN)/ruff check src tests bench examples *.py

types: $(STAMP) ## mypy, strict
	$(BIN)/mypy

contracts: $(STAMP) ## the layers of docs/ARCHITECTURE.md
	$(BIN)/lint-imports --no-cache

sim: $(STAMP) ## the simulator: make sim SEEDS=100000 [FIRST=0]
	$(BIN)/python -m tests.support.simulator --seeds $(SEEDS) $(if $(FIRST),--first $(FIRST))

chaos: PYTEST_WORKERS = 2
chaos: $(STAMP) ## long crash runs on real processes
	$(PYTEST) -m crash --long --crash-rounds=200 --chaos-seconds=120 --chaos-kills=50 --pipeline-kills=10 --timeout=1800 tests
	HOLDFAST_GAMES=20 $(PYTEST) --long --timeout=1800 tests/pipeline/state

cluster: $(STAMP) ## a pipeline on a standalone Spark cluster of bare workers, some of which die
	$(BIN)/python -m pytest --long --pipeline-kills=1 --timeout=1800 tests/cluster

lab: $(STAMP) java ## every way to lose a message, made to happen and prevented, on every engine; writes docs/lab
	$(BIN)/holdfast lab run --all --results .lab
	$(BIN)/holdfast lab report --results .lab --output docs/lab

bench: $(BENCH_STAMP) ## against Apache Kafka on this machine; writes bench/RESULTS.md
	$(BIN)/python -m bench

docs: $(STAMP) ## the documents as a site in site/, with a search; `make check` builds it as well
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

requirements: ## compile requirements/*.txt from pyproject.toml (needs uv on the PATH)
	uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links --custom-compile-command 'make requirements' pyproject.toml -o requirements/base.txt
	uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links --custom-compile-command 'make requirements' -c requirements/base.txt --extra dev pyproject.toml -o requirements/dev.txt
	uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links --custom-compile-command 'make requirements' -c requirements/dev.txt --extra bench pyproject.toml -o requirements/bench.txt

clean: ## remove what setup and tests made
	rm -rf $(VENV) .venv-3.* .mypy_cache .ruff_cache .hypothesis .lab bench/.work site
