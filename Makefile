# make demo   the whole life of a run on this machine: data, train, stop, resume, evaluate, export, reload
# make test   tests, ruff and mypy
# make test-hf4   exports read by transformers 4.57, in an environment of its own
# make test-oldest  the tests on the oldest torch that pyproject.toml allows, in an environment of its own
# Each creates its environment first. Another interpreter: make demo PYTHON=python3.12
PYTHON ?= python3
# With PYTHON=... on the command line, an environment made with another one is not taken silently.
SAME_PYTHON := $(if $(filter command line,$(origin PYTHON)),same-python)
VENV   := .venv
BIN    := $(VENV)/bin
# How OpenMP threads wait: see train.py.
export OMP_WAIT_POLICY ?= passive
export GOMP_SPINCOUNT ?= 1000
HF4    := .venv-hf4
OLDEST := .venv-oldest
# Exports for test-hf4, made anew by every run of it.
EXPORTS := runs/test-hf4-exports

.PHONY: demo test test-hf4 test-oldest format clean same-python

demo: $(VENV)/installed $(SAME_PYTHON)
	$(BIN)/python -m launch.demo

test: $(VENV)/installed-for-tests $(SAME_PYTHON)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

test-hf4: $(VENV)/installed-for-tests $(HF4)/installed
	rm -rf $(EXPORTS)
	$(BIN)/python tests/checkpoint/make_exports.py $(EXPORTS)
	GRISTMILL_EXPORTS=$(EXPORTS) $(HF4)/bin/python -m pytest --confcutdir=tests/checkpoint/hf4 tests/checkpoint/hf4

test-oldest: $(OLDEST)/installed
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest -n auto --maxprocesses 4 --dist loadfile

format: $(VENV)/installed-for-tests
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

same-python: $(VENV)/installed
	@[ "$$($(PYTHON) -c 'import sys; print(sys.version)')" = "$$($(BIN)/python -c 'import sys; print(sys.version)')" ] || \
	  { echo "$(VENV) was made with another Python than $(PYTHON); run make clean first"; exit 1; }

# The marker is written last, so an installation that was cut off is done again.
$(VENV)/installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "gristmill needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "$(PYTHON) cannot create a virtual environment (on Debian and Ubuntu: apt install python3-venv)"; exit 1; }
	@echo "installing into $(VENV); this takes a few minutes"
	$(BIN)/python -m pip install --quiet --editable '.[train,data,wandb]'
	@touch $@

$(VENV)/installed-for-tests: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable '.[train,data,wandb,lowbit,cute,dev]'
	@touch $@

$(HF4)/installed: pyproject.toml
	$(PYTHON) -m venv $(HF4)
	$(HF4)/bin/python -m pip install --quiet 'torch>=2.11,<2.14' 'transformers>=4.57,<4.58' 'numpy<3' 'safetensors<1' 'pytest<10'
	@touch $@

$(OLDEST)/installed: pyproject.toml
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install --quiet --editable '.[train,data,wandb,lowbit,cute,dev]' 'torch==2.11.*'
	@touch $@

clean:
	rm -rf $(VENV) $(HF4) $(OLDEST) $(EXPORTS) .pytest_cache .mypy_cache .ruff_cache .hypothesis
