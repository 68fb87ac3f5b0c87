# make demo: install and generate with the built-in model.   make test: install and run the tests.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: demo test test-all test-ray check lint clean

demo: $(VENV)/.installed
	$(BIN)/pagedcli generate examples/prompts.jsonl -o demo-output.jsonl --overwrite
	@echo; echo "demo-output.jsonl:"; $(BIN)/python scripts/show_rows.py demo-output.jsonl

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 -m "not slow"

RAY_TESTS = tests/distributed/test_ray.py tests/distributed/test_ray_data.py
test-all: $(VENV)/.installed-dev test-ray
	$(BIN)/python -m pytest -n 2 $(addprefix --ignore=,$(RAY_TESTS))

# Ray is installed where it can be; otherwise its tests are skipped, and say so.
test-ray: $(VENV)/.installed-dev
	-$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,ray]'
	$(BIN)/python -m pytest $(RAY_TESTS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test

# The constraints pin torch, whose newest build would bring gigabytes of CUDA packages. On a GPU machine install
# torch first, as pytorch.org says, and then: pip install '.[cuda]'.
$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info src/*.egg-info
