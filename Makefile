# make train | make test | make lint | make lock       (ARGS="..." is passed on; PYTHON=python3.12 chooses one)
PYTHON ?= python3
VENV ?= .venv
CONFIG ?= configs/digits.yaml
TEST_WORKERS ?= 2
RUN = $(VENV)/bin/python
READY = $(VENV)/.ready

.PHONY: train test lint setup lock

train: $(READY)
	$(RUN) -m cyxjax.train --config $(CONFIG) $(ARGS)

test: $(READY)
	$(RUN) -m pytest -n $(TEST_WORKERS) --dist loadfile $(ARGS)

lint: $(READY)
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy

setup: $(READY)

# Done once: the stamp is newer than what it was made from. Every package is checked against its hash, and
# all is compiled to bytecode: where PYTHONDONTWRITEBYTECODE is set, each process of a run would do it anew.
$(READY): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than 3.11. HINT: make PYTHON=python3.12"; exit 2; }
	@echo "Setting up $(VENV), once: a minute or two."
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "$(PYTHON) cannot make $(VENV). HINT: on Debian, apt-get install python3-venv"; exit 2; }
	$(RUN) -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@$(RUN) -m compileall -q cyxjax
	@touch $@

# Versions for every supported Python at once, with hashes and without addresses; needs uv.
lock:
	uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 --generate-hashes \
	  --no-emit-index-url --no-annotate --no-header --quiet --output-file requirements.lock
