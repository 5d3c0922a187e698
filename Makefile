# Every target sets up what it needs in .venv by itself; the second call is fast.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
READY := $(VENV)/.ready
DOCS := $(VENV)/.ready-docs
ALL := $(VENV)/.ready-all
export OMP_NUM_THREADS := 1

.PHONY: help setup demo test test-all coverage lint bench docs protocol catalogue package constraints clean
help:
	@echo "make setup | demo | test | test-all | coverage | lint | bench | docs | protocol | catalogue | package | constraints | clean"

setup: $(READY)
$(READY): pyproject.toml constraints.txt setup.py $(wildcard src/coterie/train/native/*.c)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || (echo "Python 3.11 or newer is needed (set PYTHON=...)"; exit 1)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) setuptools
	$(PIP) --no-build-isolation -e ".[dev,federation]" -e examples/fedclip
	@touch $@

$(DOCS): $(READY)
	$(PIP) --no-build-isolation -e ".[docs]"
	@touch $@

$(ALL): $(READY)
	$(PIP) --no-build-isolation -e ".[test-all]"
	@touch $@

DEMO := --data digits --clients 12 --partition "rotate(2, 0.5)" --join 1 --rounds 20 --set test_share=0.4 --set public=100
demo: $(READY)
	$(BIN)/coterie compare local fedavg fedper ditto fedcpmd fedcpmd-mended fedpc fedpc-mended fedgmh fedgmh-mended ecs-fl ecs-fl-mended sc-fpfl sc-fpfl-mended $(DEMO) --seeds 2 --set eval_every=5 --out runs/demo
	$(BIN)/coterie figure clients runs/demo -o runs/demo/clients.png
	$(BIN)/coterie report runs/demo -o runs/demo/report.html
	@echo
	@echo "Open runs/demo/report.html in a browser. Next, try:"
	@echo "  . $(BIN)/activate"
	@echo "  coterie run fedper $(subst ",',$(DEMO)) --seed 7"
	@echo "  coterie data show --data digits --clients 12 --partition 'rotate(2, 0.5)'"
	@echo "  coterie show fedcpmd"

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not long"
	$(BIN)/python -m pytest tests/on_device -m "not long"

test-all: $(ALL)
	$(BIN)/python -m pytest -n 2 --dist loadgroup $(ARGS)
	$(BIN)/python -m pytest tests/on_device -n 2 --dist loadgroup

coverage: ARGS := --cov=coterie --cov-report=term:skip-covered --cov-report=xml --cov-report=html
coverage: test-all

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict

bench: $(READY)
	$(BIN)/python benchmarks/bench.py $(ARGS)

protocol: $(READY)
	cd src && ../$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. coterie/federation/protocol/coterie.proto

# what `coterie list` and `coterie show` print without loading the methods
catalogue: $(READY)
	$(BIN)/python -m coterie.cli.method_facts

docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html"

# Wheel and source distribution, checked, and installed in a fresh environment.
package: $(READY)
	$(PIP) --no-build-isolation -e ".[release]"
	rm -rf dist build/try
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv build/try
	build/try/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	cd build/try && bin/coterie --version && bin/coterie run fedavg --rounds 1 --out run

# Versions that development, tests and CI use, from pyproject.toml and constraints.in. Versions that still fit stay;
# ARGS=--upgrade takes the newest. A build of torch for the CPU is found by pip's own settings, its suffix is cut off.
constraints:
	$(PYTHON) -m venv build/pip-tools
	build/pip-tools/bin/python -m pip install --quiet --disable-pip-version-check --upgrade pip pip-tools
	CUSTOM_COMPILE_COMMAND="make constraints" build/pip-tools/bin/pip-compile --quiet --all-extras --all-build-deps \
		--strip-extras --unsafe-package coterie --no-emit-index-url --no-emit-find-links $(ARGS) \
		-c constraints.in -o constraints.txt pyproject.toml
	sed -i 's/^\(torch==[0-9.]*\)+.*/\1/' constraints.txt

clean:
	rm -rf $(VENV) build dist site htmlcov coverage.xml .coverage* .pytest_cache .mypy_cache .ruff_cache
