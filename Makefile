# Two commands do all the set-up on a fresh machine, each alone: `make run` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: run test slow gpu chapters grade pictures clean

run: $(VENV)/.run                  ## a few answers from the embedded model, several at once, offline
	$(BIN)/python nano_serve.py

test: $(VENV)/.test                ## the whole suite but the slow proofs
	$(BIN)/python -m pytest

slow: $(VENV)/.test                ## the longer proofs
	$(BIN)/python -m pytest -m "slow and not gpu"

gpu: $(VENV)/.test                 ## what needs a CUDA or ROCm device
	$(BIN)/python -m pytest -m gpu

$(VENV)/.run: requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -r requirements.txt
	touch $@

$(VENV)/.test: requirements.txt requirements-test.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -r requirements-test.txt
	touch $(VENV)/.run $@

clean:
	rm -rf $(VENV) .pytest_cache .hypothesis
