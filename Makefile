# make quickstart: from nothing to a small model that answers, and a report. make quickstart-full: what comes after
# fine-tuning too, on the quickstart's model. make test: the whole suite and the linter.
# Needs Python 3.11 or newer and make. Nothing is installed again until a requirements file changes.
SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
BIN := .venv/bin
RUN := $(BIN)/python

.PHONY: quickstart quickstart-full test clean

quickstart: .venv/installed
	$(RUN) scripts/train_tokenizer.py
	$(RUN) trainer/train_pretrain.py --tokenizer_path out/tokenizer
	$(RUN) scripts/mid_train.py
	$(RUN) trainer/train_full_sft.py
	$(RUN) eval/report.py
	$(RUN) scripts/chat.py --temperature 0 --prompt "Who are you?"
	$(RUN) scripts/chat.py --temperature 0 --prompt "你是谁？"
	@echo "Talk to it: $(RUN) scripts/chat.py    Read how it went: out/report.html"

quickstart-full: .venv/installed $(if $(wildcard out/full_sft_*/config.json),,quickstart)
	$(RUN) trainer/train_dpo.py
	$(RUN) trainer/train_grpo.py --max_steps 150
	$(RUN) trainer/train_agent.py --max_steps 40
	$(RUN) trainer/train_ppo.py --max_steps 20
	$(RUN) trainer/train_distillation.py --max_steps 150
	$(RUN) eval/report.py
	$(RUN) scripts/chat.py --weight agent --temperature 0 --tools 1 --prompt "What is the sum of the phone numbers of Ella and Robin?"

test: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(RUN) -m pytest -n 2 --dist loadgroup

.venv/installed: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; set PYTHON=/path/to/it"; exit 1; }
	test -x $(RUN) || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -r requirements.txt
	touch $@

.venv/installed-dev: requirements-dev.txt requirements-serve.txt .venv/installed
	$(BIN)/pip install --quiet -r requirements-dev.txt
	touch $@

clean:
	rm -rf out checkpoints data
