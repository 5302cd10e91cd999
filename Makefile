# Two commands do all the set-up on a fresh machine, each alone: `make run` and `make test`. Without make: the README.
PYTHON ?= python3
CH     ?= 1
VENV   ?= .venv
BIN    := $(VENV)/bin

.PHONY: run test short slow gpu chapters grade lab pictures clean

run: $(VENV)/.run                  ## a few answers from the embedded model, several at once, offline
	$(BIN)/python nano_serve.py

test: $(VENV)/.test                ## the whole suite but the slow proofs
	$(BIN)/python -m pytest

# For another Python: make short PYTHON=python3.13 VENV=.venv-3.13
short: $(VENV)/.test               ## every file compiled, the front doors tested, in a minute or two
	$(BIN)/python -m compileall -q -f *.py extras chapters tests models
	$(BIN)/python -m pytest tests/test_command_line.py tests/test_machines.py tests/test_text.py tests/test_kv_cache.py \
		tests/test_nano_serve.py tests/test_async_engine.py

slow: $(VENV)/.test                ## the longer proofs
	$(BIN)/python -m pytest -m "slow and not gpu"

gpu: $(VENV)/.test                 ## what needs a CUDA or ROCm device
	$(BIN)/python -m pytest -m gpu

chapters: $(VENV)/.run             ## every walk-through, on one rank
	for chapter in $(filter-out %.zh.py,$(wildcard chapters/ch*.py)); do $(BIN)/python $$chapter --tp 1 || exit 1; done

# The grader exits with 1 while a task is unsolved. That is an answer and no error of make's, as another code would be.
grade: $(VENV)/.run                ## your answers to a chapter's exercises: make grade CH=1
	@$(BIN)/python chapters/exercises/grade.py $(CH) || [ $$? -eq 1 ]

lab: $(VENV)/.run                  ## your function in the engine, proved: make lab CH=1
	@$(BIN)/python chapters/exercises/lab.py $(CH) || [ $$? -eq 1 ]

pictures: $(VENV)/.run             ## the README's pictures, drawn again
	$(BIN)/python chapters/ch01_paradigm.py --tp 1 --lang en --width 100 --save out
	mkdir -p chapters/pictures
	cp out/ch01_timeline.svg out/ch01_batch_curve.svg out/ch01_preemption.svg chapters/pictures/

$(VENV)/.run: requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -r requirements.txt
	touch $@

$(VENV)/.test: requirements.txt requirements-test.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -r requirements-test.txt
	touch $(VENV)/.run $@

clean:
	rm -rf .venv .venv-* .pytest_cache .hypothesis
