# `make study` and `make test` need nothing but Python (3.11 or later) and a C++ compiler; each installs what it uses.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: study testbed-study gpu-study wheels check test test-all lint bench bench-search coverage parity bench-testbed chaos predictions golden schema reference docs install clean

# Five engines on two processes, three runs each, and which of them is fastest; then the report as a page.
study: $(INSTALLED)
	$(BIN)/zeroscale sweep study=smoke; status=$$?; \
	$(BIN)/zeroscale report results/runs/smoke --out results/reports/smoke && exit $$status

# As root, with Debian's slurm-wlm, munge and iproute2: a real Slurm of four nodes on this machine, and down again.
# TESTBED_STUDY="fsdp_beside_zero_testbed --rates 100mbit" is another study than `testbed`, and its links' speeds.
testbed-study: $(INSTALLED)
	$(BIN)/python slurm/testbed_study.py $(TESTBED_STUDY)

# On a machine with a GPU: GPU_STUDY="--machine h200" names its peak, --trial plans all of it on a CPU.
gpu-study: $(INSTALLED)
	$(BIN)/python slurm/gpu_study.py $(GPU_STUDY)

# Into wheels/, with torch, for a machine with this Python and without a network: pip install --no-index --find-links wheels 'zeroscale[run]'
wheels: $(INSTALLED)
	$(BIN)/pip wheel --no-build-isolation --constraint constraints.txt --wheel-dir wheels '.[run]'

# Tests start hundreds of interpreters, and each would compile all it imports again.
unexport PYTHONDONTWRITEBYTECODE

# Two tests at a time, and those of Slurm besides, which mostly wait (tests/conftest.py).
TOGETHER := --dist loadscope --no-loadscope-reorder

# Before every commit: lint, and the tests that start no process.
check: lint
	$(BIN)/pytest --numprocesses 2 $(TOGETHER) -m "not processes and not thorough"

# Before every merge: besides, real runs of every engine, launcher and outcome.
test: lint
	$(BIN)/pytest --numprocesses 3 $(TOGETHER) -m "not timed and not thorough" --durations 20

# All tests, as CI runs them: besides, browser, accounting, containers, notebooks, long drills; then what measures time, alone.
test-all: lint
	$(BIN)/pytest --numprocesses 4 $(TOGETHER) -m "not timed" --durations 20
	$(BIN)/pytest -m timed --durations 20 $$(grep -rl --include='test_*.py' 'mark\.timed' tests)

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/mypy slurm/testbed slurm/testbed_study.py slurm/gpu_study.py
	$(BIN)/mypy -p docs.generate
	$(BIN)/lint-imports
	$(BIN)/python -m tests.prose

bench: $(INSTALLED)
	$(BIN)/python -m tests.benchmarks.overhead
	$(BIN)/python -m tests.benchmarks.command
	$(BIN)/python -m tests.benchmarks.expansion
	$(BIN)/python -m tests.benchmarks.status
	$(BIN)/python -m tests.benchmarks.prediction
	$(BIN)/python -m tests.benchmarks.reading
	$(BIN)/python -m tests.benchmarks.layouts

# How many trials a search takes: 60 replays of each way on published steps; some ten minutes of one core.
bench-search: $(INSTALLED)
	$(BIN)/python -m tests.benchmarks.search

# The tables of the method page, by simulation; SERIES, RUNS, FAMILIES and HISTORIES say how many of each.
SERIES ?= 2000
RUNS ?= 40
FAMILIES ?= 1000
HISTORIES ?= 400
coverage: $(INSTALLED)
	$(BIN)/python -m tests.benchmarks.coverage --series $(SERIES)
	$(BIN)/python -m tests.benchmarks.windows --runs $(RUNS)
	$(BIN)/python -m tests.benchmarks.verdicts --families $(FAMILIES)
	$(BIN)/python -m tests.benchmarks.histories --histories $(HISTORIES)

# As root, like testbed-study.
bench-testbed: $(INSTALLED)
	$(BIN)/python -m tests.benchmarks.packed

# Random faults by seeds over sweeps on a testbed and here, as root; CHAOS="--seeds 1-20" says which, --dry-run what they do.
chaos: $(INSTALLED)
	cd tests/slurm && $(abspath $(BIN))/python -m chaos $(CHAOS)

# Whether every engine trains as one process does, over a covering set of layouts; PARITY="--seed 2 --first 20", --dry-run.
parity: $(INSTALLED)
	cd tests/bench/engines && $(abspath $(BIN))/python -m parity $(PARITY)

# Predictions beside what came true, anew: after formulas or recorded runs have changed. The rehearsals it reads take a quarter
# of an hour more: python -m tests.benchmarks.rehearsals rehearsed, and then beside_real; those of Frontier six minutes: frontier.
predictions: $(INSTALLED)
	$(BIN)/python -m analysis.validation

# What the command answers, into golden/, and its digests anew: where an answer is meant to change, or to see how it did.
golden: $(INSTALLED)
	$(BIN)/python -m tests.golden golden

# The published form of a record, after bench/core/record.py has changed; and what editors know of the files of conf/.
schema: $(INSTALLED)
	$(BIN)/zeroscale init conf --schema
	$(BIN)/python -c "import json; from bench.core.record import RunRecord; print(json.dumps(RunRecord.model_json_schema(), indent=1))" > bench/core/record.schema.json

# The pages of docs/reference, after commands, keys, columns, flags or outcomes have changed.
reference: $(INSTALLED)
	$(BIN)/python -m docs.generate

# The pages as a site, into docs/_site; a link to nowhere, or a page that nothing leads to, is an error.
docs: reference
	$(BIN)/sphinx-build --fail-on-warning --keep-going --nitpicky --fresh-env --write-all --quiet docs docs/_site

install: $(INSTALLED)

# torch first: DeepSpeed's own build looks for it.
$(INSTALLED): pyproject.toml constraints.txt
	@echo "installing into $(VENV), some minutes the first time"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch setuptools wheel
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[run,dev]'
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis dist
