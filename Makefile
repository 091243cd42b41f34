# make run    start gputop: live where there is an NVIDIA driver, else the simulated node
# make test   the whole test suite, real TensorFlow on the CPU included
# make test-cluster  the tests of clusters with a real Prometheus, Slurm and sshd (Debian's, unpacked into DEBIAN)
# make test-install  before a release: gputop on Python 3.10 to 3.14, by pip, pipx and uv, and beside the frameworks' pins
# make lint   ruff, the type checker, and the layers that packages may import from
# make fuzz   hostile input at every door, FUZZ_SECONDS=600; make soak: growth of the monitor over time, SOAK_MINUTES=60
# make lock, make sbom: the files that CI installs, with their hashes; a bill of materials
# make reference: the pages of findings and steps, which are made from the code; make docs: the site, with all such pages, into build/site
# make cluster-demo: 200 simulated nodes, a Prometheus (Debian's, unpacked where it is not there) that scrapes them, and gputop cluster on it
# make screenshots, make bench; make bench-advice: how right the advice is, on traces with known causes
# Everything is set up in VENV on first use, from a package index; Python (3.10 or newer, with venv) is needed, and gcc for the tests.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q

.PHONY: run test test-cluster test-install lint lock sbom fuzz soak reference docs cluster-demo screenshots bench bench-advice clean

$(VENV)/.made:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "gputop needs Python 3.10 or newer: make PYTHON=python3.12 run")'
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.run: $(VENV)/.made pyproject.toml setup.py tools/make_completion.py
	$(PIP) install -e .
	touch $@

# LOCK=requirements/ci.txt installs for tests and lint the very files listed there, by their hashes, as .ci/run does;
# without it what pyproject.toml allows today. `make lock` writes that list anew.
ifdef LOCK
$(VENV)/.locked: $(VENV)/.made $(LOCK)
	$(PIP) install --require-hashes -r $(LOCK)
	$(PIP) install --no-deps --no-build-isolation -e .
	touch $@

$(VENV)/.test $(VENV)/.lint: $(VENV)/.locked
	touch $@
else
$(VENV)/.test: $(VENV)/.run
	$(PIP) install -e '.[test]'
	touch $@

$(VENV)/.lint: $(VENV)/.run
	$(PIP) install -e '.[lint]'
	touch $@
endif

lock: $(VENV)/.made
	$(PIP) install uv
	$(BIN)/uv pip compile -q pyproject.toml requirements/build.in --extra test --extra lint --universal --python-version 3.10 \
	  --generate-hashes --no-annotate --no-header --upgrade -o requirements/ci.txt

# What an installation consists of, as CycloneDX.
sbom: $(VENV)/.run
	$(BIN)/python requirements/bill_of_materials.py > gputop.cdx.json

run: $(VENV)/.run
	@if $(BIN)/python -c 'import ctypes; ctypes.CDLL("libnvidia-ml.so.1")' 2>/dev/null; then \
	  exec $(BIN)/gputop; \
	else \
	  echo "No NVIDIA driver on this machine: starting the simulated node (gputop --demo)."; \
	  exec $(BIN)/gputop --demo; \
	fi

# Two processes more than cores: many tests wait for a process or a server. A file's tests stay in one process.
# What one of them, or a program that a test starts, has compiled, the others read, even where the environment says
# not to write bytecode: to compile all tests takes three times as long as to read them.
TEST_PROCESSES ?= $(shell expr 2 + $$(nproc))
PYTEST := $(BIN)/python -m pytest tests
# JSON: a line for each test that failed, and two brackets.
FAILED := .pytest_cache/v/cache/lastfailed

test: export PYTHONDONTWRITEBYTECODE :=
test: $(VENV)/.test
	@echo "The whole suite in $(TEST_PROCESSES) processes: they read the tests first (a quarter of a minute on a fresh clone), then a dot a test."
	$(PYTEST) -n $(TEST_PROCESSES) --no-loadscope-reorder $(PYTEST_ARGS) || { \
	  test $$? -eq 1 && test $$(wc -l < $(FAILED)) -le 5 || exit 1; \
	  echo "At most three failed: once more, each alone. One that passes now is still to be mended: it depends on chance."; \
	  $(PYTEST) --last-failed --last-failed-no-failures none --maxfail 1 -v; }

DEBIAN ?= $(VENV)/debian

test-cluster: $(VENV)/.test
	PATH="$$PATH:$$(tests/debian_packages.sh $(DEBIAN))" $(BIN)/python -m pytest -rs tests/cluster tests/tui/cluster \
	  tests/advice/fleet tests/export tests/commands/test_cluster.py tests/commands/test_cluster_nodes.py \
	  tests/commands/test_export.py tests/doctor/test_cluster.py $(PYTEST_ARGS)

# Python 3.14 is Debian's where none is on the PATH. The tables go into docs/project/support-matrix.md.
test-install: export GPUTOP_TEST_INSTALL := 1
test-install: $(VENV)/.test
	$(PIP) install pipx uv
	PATH="$$PATH:$$(tests/debian_python.sh $(DEBIAN)-python 3.14)" $(BIN)/python -m pytest -rs tests/test_install.py $(PYTEST_ARGS)

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

FUZZ_SECONDS ?= 600
SOAK_MINUTES ?= 60

fuzz: $(VENV)/.test
	$(BIN)/python -m tests.campaign.fuzz --seconds $(FUZZ_SECONDS) $(FUZZ_ARGS)

soak: $(VENV)/.test
	$(BIN)/python -m tests.campaign.soak --minutes $(SOAK_MINUTES) $(SOAK_ARGS)

reference: $(VENV)/.run
	$(PIP) install prometheus-client
	$(BIN)/python tools/make_reference.py

docs: $(VENV)/.run
	$(PIP) install -e '.[docs]' prometheus-client
	$(BIN)/python tools/site_pages.py
	$(BIN)/zensical build --strict --clean -f build/zensical.toml

cluster-demo: $(VENV)/.run
	PATH="$$PATH:$$(tests/debian_packages.sh $(DEBIAN) prometheus promtool)" $(BIN)/python benchmarks/cluster_lab.py --show

screenshots: $(VENV)/.run
	$(BIN)/python screenshots/make.py
	$(BIN)/python screenshots/loop.py

bench: $(VENV)/.run
	$(PIP) install nvitop
	$(BIN)/python benchmarks/monitor_cost.py
	$(BIN)/python benchmarks/history.py
	$(BIN)/python benchmarks/decode.py
	$(BIN)/python benchmarks/timeline.py
	$(PIP) install -e '.[xprof]'
	$(BIN)/python benchmarks/trace_engine.py

bench-advice: $(VENV)/.run
	$(BIN)/python benchmarks/advice.py $(BENCH_ARGS)

clean:
	rm -rf $(VENV) build gputop/completion *.egg-info .pytest_cache .mypy_cache .ruff_cache
