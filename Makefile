# make help lists the targets       (ARGS="..." is passed on; PYTHON=python3.12 chooses one)
PYTHON ?= python3
VENV ?= .venv
CONFIG ?= configs/digits.yaml
TEST_WORKERS ?= 3
RUN = $(VENV)/bin/python
READY = $(VENV)/.ready
DEV = $(VENV)/.ready-dev

# One more than the 2 cores of CI, as many tests wait for processes; with a fourth they were as quick. Files in the
# order of tests/conftest.py.
# Bytecode is kept: pytest would rewrite each file's asserts in every worker of every run.
PYTEST = PYTHONDONTWRITEBYTECODE= $(RUN) -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: help train test fast oldest cover format notebooks lint docs setup lock

help:  ## lists the targets
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 16

train: $(READY)  ## trains CONFIG (default: configs/digits.yaml); ARGS="--epochs 30" goes on
	$(RUN) -m cyxjax.train --config $(CONFIG) $(ARGS)

test: $(DEV)  ## runs the tests but for the slow rows; those: ARGS="-m 'slow and not wide'"
	$(PYTEST) $(ARGS)

# Nothing of it waits, so a worker a core: each loads jax and all files. Left out is what compiles or trains.
FAST_LEAVES = models train test_testing.py cli/test_init.py core/test_first_values.py
fast: $(DEV)  ## runs the tests that compile and train little: under a minute on 2 cores
	$(PYTEST) -n 2 -m "not slow and not multiprocess" tests/house tests/unit \
	  $(FAST_LEAVES:%=--ignore=tests/unit/%) $(ARGS)

# The lower bounds in pyproject.toml, in an environment of their own.
OLDEST = build/oldest
oldest: RUN = $(OLDEST)/bin/python
oldest:  ## runs the tests with the oldest packages that pyproject.toml accepts; needs uv
	uv venv --quiet --clear --python $(PYTHON) $(OLDEST)
	uv pip install --quiet --python $(RUN) --resolution lowest-direct --editable '.[dev]' --group build
	$(PYTEST) $(ARGS)

cover: $(DEV)  ## runs the tests; shows which lines they do not reach
	$(PYTEST) --cov --cov-report=term-missing:skip-covered $(ARGS)

format: $(DEV)  ## writes lines as they should be
	$(RUN) -m ruff format .
	$(RUN) -m ruff check --fix .

notebooks: $(DEV)  ## runs the notebooks and writes their outputs into the files
	$(RUN) -m jupytext --sync notebooks/*.py
	CYXJAX_WRITE_NOTEBOOKS=1 $(RUN) -m pytest -m slow tests/house/test_notebooks.py

lint: $(DEV)  ## formatting, ruff, mypy; changes nothing
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy

docs: $(DEV)  ## builds the documentation site into build/site; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --quiet --strict --config-file .github/mkdocs.yml

setup: $(DEV)  ## makes .venv with everything that the targets here need

# A stamp is newer than what it was made from. Every package is checked against its hash, and the package
# is compiled to bytecode: where PYTHONDONTWRITEBYTECODE is set, each process of a run would do it again.
$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than 3.11. HINT: make PYTHON=python3.12"; exit 2; }
	@echo "Setting up $(VENV), once: about a minute."
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "$(PYTHON) cannot make $(VENV). HINT: on Debian, apt-get install python3-venv"; exit 2; }
	$(RUN) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@$(RUN) -m compileall -q cyxjax
	@touch $@

$(DEV): $(READY) requirements-dev.lock
	@echo "Installing what tests, linters and the documentation need, once: a minute or two."
	$(RUN) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements-dev.lock
	@touch $@

# Versions for every supported Python at once, with hashes and without addresses; needs uv. The small lock
# (what `make train` installs) takes its versions from the large one.
LOCKED = --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate --no-header --no-strip-extras --quiet
lock:  ## pins all dependencies anew; needs uv
	uv pip compile pyproject.toml --extra dev --group build $(LOCKED) --output-file requirements-dev.lock
	uv pip compile pyproject.toml --extra digits --group build --constraint requirements-dev.lock $(LOCKED) \
	  --output-file requirements.lock
