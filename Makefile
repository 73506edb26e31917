# make demo   trains a small language model and writes a loss curve and a text sample (about three minutes)
# make test   the whole test suite; the same command runs in CI
# Both make .venv with Python 3.12 or newer and install what they need.

SHELL := /bin/bash
FIND_PYTHON = for p in python3.14 python3.13 python3.12 python3 python; do \
	  if $$p -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then echo $$p; exit 0; fi; done; \
	echo "Python 3.12 or newer is needed and none was found" >&2; exit 1

.PHONY: demo test test-oldest lint bench clean

demo: .venv/.plot
	JAX_PLATFORMS=cpu .venv/bin/python -m experiments.demo

test: .venv/.dev
	.venv/bin/python -m pytest -n auto --maxprocesses 8 --dist worksteal -q

# The core of the suite on the oldest supported JAX.
test-oldest: .venv-oldest/.dev
	.venv-oldest/bin/python -m pytest -n auto --maxprocesses 8 -q -m core

lint: .venv/.dev
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy

bench: .venv/.dev
	JAX_PLATFORMS=cpu .venv/bin/python -m experiments.bench

.venv/.plot: pyproject.toml
	python=$$($(FIND_PYTHON)) && $$python -m venv .venv
	.venv/bin/python -m pip install --quiet --editable ".[plot]"
	touch $@

.venv/.dev: pyproject.toml
	python=$$($(FIND_PYTHON)) && $$python -m venv .venv
	.venv/bin/python -m pip install --quiet --editable ".[dev]"
	touch $@ .venv/.plot

.venv-oldest/.dev: pyproject.toml constraints-oldest.txt
	python=$$($(FIND_PYTHON)) && $$python -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --constraint constraints-oldest.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf .venv .venv-oldest runs build *.egg-info
