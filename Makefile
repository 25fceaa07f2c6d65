# Two commands are all a fresh machine needs: `make demo` and `make test`.
# Each sets up .venv by itself; only Python 3.11+ and make are assumed.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.PHONY: demo test check bench gpu-check docs clean

demo: $(STAMP)
	$(PY) -m mezzo demo

# Two processes, each with whole files: what a test leaves in a process meets the rest of its file only.
test: $(STAMP)
	$(PY) -m pytest -n 2 --dist loadfile

check: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# Side-by-side timings, printed as a table and written to benchmarks/results/.
bench: $(STAMP)
	$(PY) -m benchmarks
	$(PY) -m benchmarks.memory --output benchmarks/results

# The tests that need a CUDA device, and the demo on it; under five minutes.
gpu-check: $(STAMP)
	$(PY) -m pytest -m gpu --gpu-required tests
	$(PY) -m mezzo demo --device cuda

# The op reference is generated from the tables; a test holds it current.
docs: $(STAMP)
	$(PY) -m mezzo.cli.reference docs/op-reference.md

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) build dist demo-output .pytest_cache .mypy_cache .ruff_cache
