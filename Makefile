# Two commands are all a fresh machine needs: `make demo` and `make test`.
# Each sets up .venv by itself; only Python 3.11+ and make are assumed.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

# The version of JAX to test with, such as 0.9.1; empty for the one in .venv.
VERSION ?=
JAX_VENV := $(if $(VERSION),.venv-jax-$(VERSION),$(VENV))

.PHONY: demo test test-jax check bench gpu-check docs clean

demo: $(STAMP)
	$(PY) -m mezzo demo

# Two processes, each with whole files: what a test leaves in a process meets the rest of its file only. Without the last
# option but one files with few tests would come last, and those are the ones that take long; tests/slow_files.py has the order.
# A process that dies is replaced and its file begun anew where it died, which must not go on for ever.
PYTEST := -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 2

test: $(STAMP)
	$(PY) $(PYTEST)

# What concerns JAX, also with another version of it: make test-jax VERSION=0.9.1. That has an environment of its own,
# without PyTorch.
test-jax: $(JAX_VENV)/.installed
	$(JAX_VENV)/bin/python $(PYTEST) tests/core tests/conformance tests/jax

check: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# Side-by-side timings, printed as a table and written to benchmarks/results/.
bench: $(STAMP)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[bench]"
	$(PY) -m benchmarks
	$(PY) -m benchmarks.memory --output benchmarks/results

# The tests that need a CUDA device, and the demo on it; under five minutes.
gpu-check: $(STAMP)
	$(PY) -m pytest -m gpu --gpu-required tests
	$(PY) -m mezzo demo --device cuda

# The op reference is generated from the tables; a test holds it current.
docs: $(STAMP)
	$(PY) -m mezzo.cli.reference docs/op-reference.md

# TensorPlay has wheels for few machines, and no source: on others what needs it is skipped. pip knows the tags.
TENSORPLAY_WHEELS := cp31\([1-3]\)-cp31\1-manylinux_2_35_x86_64

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	extras=dev; \
	if $(PY) -m pip debug --verbose 2>&1 | grep -q '$(TENSORPLAY_WHEELS)'; then extras=dev,tensorplay; \
	else echo "TensorPlay has no wheel for this machine (it needs Linux on x86_64 with glibc 2.35): its tests are skipped"; fi; \
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$$extras]"
	touch $(STAMP)

# What is released for one version of JAX does not go with the pins for another; the other pins hold.
.venv-jax-%/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-jax-$*
	grep -vE '^(jax|jaxlib|flax|optax|equinox|orbax-checkpoint)==' constraints.txt > .venv-jax-$*/constraints.txt
	.venv-jax-$*/bin/python -m pip install --quiet --disable-pip-version-check \
		-c .venv-jax-$*/constraints.txt "jax==$*" -e ".[test-jax]"
	touch $@

clean:
	rm -rf $(VENV) .venv-jax-* build dist demo-output .pytest_cache .mypy_cache .ruff_cache
