# Every target sets up what it needs in .venv by itself; the second call is fast.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
RAY := $(VENV)/.ready-ray
DOCS := $(VENV)/.ready-docs
export OMP_NUM_THREADS := 1

.PHONY: help setup demo test test-all lint bench docs package clean
help:
	@echo "make demo | test | test-all | lint | bench | docs | package | clean"

setup: $(READY)
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || (echo "Python 3.11 or newer is needed (set PYTHON=...)"; exit 1)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e ".[dev,flower]" -e examples/fedclip
	@touch $@

$(RAY): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e ".[ray]"
	@touch $@

$(DOCS): $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e ".[docs]"
	@touch $@

DEMO := --data digits --clients 12 --partition "rotate(2, 0.5)" --join 1 --rounds 20 --set test_share=0.4 --set public=100
demo: $(READY)
	$(BIN)/coterie compare local fedavg fedper ditto fedcpmd fedpc fedgmh ecs-fl sc-fpfl $(DEMO) --seeds 3 --set eval_every=5 --out runs/demo
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

test-all: $(READY) $(RAY) $(DOCS)
	$(BIN)/python -m pytest -n 2 --dist loadgroup

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict

bench: $(READY)
	$(BIN)/python benchmarks/bench.py $(ARGS)

docs: $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html"

# Wheel and source distribution, checked, and installed in a fresh environment.
package: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt build twine
	rm -rf dist build/try
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv build/try
	build/try/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	cd build/try && bin/coterie --version && bin/coterie run fedavg --rounds 1 --out run

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache
