# The system Python that creates .venv, and what the environment is made for: auto, cpu or gpu.
PYTHON ?= python3
DEVICE ?= auto

BIN := .venv/bin
READY := .venv/ready-$(DEVICE)
# How many test processes run beside each other.
TEST_PROCESSES ?= 2
# Given in full, so that no `accelerate config` of the user changes what runs.
LAUNCH := $(BIN)/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-kernels test-gpu quality style kernel docs clean

help:  ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY)  ## Create .venv with everything installed (DEVICE=cpu or DEVICE=gpu to choose).

$(READY): pyproject.toml scripts/setup_env.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	{ echo 'Python 3.11 or newer is needed, and "$(PYTHON)" is not. Name one with: make PYTHON=python3.11'; exit 1; }
	@$(PYTHON) scripts/setup_env.py --device $(DEVICE)

demo: setup  ## Train the tiny reasoner with sparse rollouts; results go to outputs/demo.
	$(LAUNCH) $$(grep -qx cpu .venv/device && echo --cpu) examples/grpo_sparse.py

test: setup  ## Run all tests.
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile

test-kernels: setup  ## Run the tests of sparrow_attention alone.
	$(BIN)/python -m pytest kernels/tests

test-gpu: setup  ## Run the tests that a GPU is for: the Triton kernels, natively, the engine's GPU backend, a server.
	$(BIN)/python -m pytest kernels/tests tests/test_gpu_backend.py tests/test_gpu_server.py tests/test_gpu_checkpoints.py

quality: setup  ## Check lint and format.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

style: setup  ## Fix lint and format.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

kernel: setup  ## Lay the kernels out as the Kernel Hub has them, into kernels/build/.
	$(BIN)/python scripts/build_kernel.py

docs: setup  ## Build the documentation into site/.
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

clean:  ## Remove what builds and tests leave; .venv and outputs/ stay.
	rm -rf build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis
	find sparrow_trl kernels examples tests scripts -name __pycache__ -type d -exec rm -rf {} +
