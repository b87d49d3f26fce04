# Two commands from a bare checkout, with nothing installed but Python 3.11 and make:
#   make demo    the main job, on the demo model, without a GPU
#   make test    format, lint, types, import rules and all tests
PYTHON ?= python3.11
VENV ?= .venv
LOCK ?= requirements/cpu.lock
# Where CPU builds of torch are, for machines whose package index has none.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# Modules are compiled where they are imported first: all of them take as long as the rest of it.
PIP_FLAGS := -q --no-deps --no-compile
BIN := $(VENV)/bin
STAMP := $(VENV)/installed
# What compiles comes before what is interpreted.
V2_TESTS := tests/engine/test_compiled_norms.py tests/engine tests/runtime tests/esamp \
  tests/consumers tests/fuzz tests/logprobs/test_engines.py tests/logprobs/test_lanes.py tests/oracle
# It starts no engine and runs no kernel.
V2_TESTS += --ignore=tests/runtime/test_benchmark_peers.py
V1_ENGINE_TESTS := tests/engine tests/fuzz
# Two at a time, in this order: the first takes as long as the two others. Each process imports vLLM
# once, and once more for those that it forks.
PASSES := test-v1 test-v2 test-v1-engine

# Containers often set it; then each process compiles all of vLLM that it imports, for half a minute.
unexport PYTHONDONTWRITEBYTECODE
export HF_HUB_OFFLINE := 1
export VLLM_CPU_KVCACHE_SPACE := 1

.PHONY: demo test $(PASSES) test-oldest test-newest lint format clean

$(STAMP): $(LOCK) pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install $(PIP_FLAGS) -r $(LOCK) || \
	  $(BIN)/pip install $(PIP_FLAGS) --extra-index-url $(TORCH_INDEX) -r $(LOCK)
	$(BIN)/pip install -q --no-deps --no-build-isolation -e .
	touch $@

# What vLLM warns of on a CPU is no matter of the demo's, and stands before it.
demo: export VLLM_LOGGING_LEVEL ?= ERROR
demo: $(STAMP)
	$(BIN)/python -m demo

test $(PASSES): export VLLM_LOGGING_LEVEL ?= WARNING

# Side by side: vLLM's V1 runner, and its V2 runner with every Triton kernel interpreted.
test: $(STAMP)
	$(MAKE) --no-print-directory -j2 -Otarget lint $(PASSES)

test-v1: $(STAMP)
	$(BIN)/python -m pytest -q $(addprefix --ignore=,$(V1_ENGINE_TESTS))

test-v1-engine: $(STAMP)
	$(BIN)/python -m pytest -q $(V1_ENGINE_TESTS)

test-v2: $(STAMP)
	TLLM_TEST_RUNNER=v2 $(BIN)/python -m pytest -q $(V2_TESTS)

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The oldest vLLM that is supported.
test-oldest:
	$(MAKE) --no-print-directory -j2 -Otarget VENV=.venv-oldest \
	  LOCK=requirements/cpu-oldest.lock $(PASSES)

# The newest, of which there is no build for CPUs: its Python on the kernels of the locked one.
test-newest: $(STAMP)
	$(BIN)/python -m tests.newest_vllm .newest
	PYTHONPATH=$(CURDIR)/.newest $(MAKE) --no-print-directory -j2 -Otarget $(PASSES)

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .venv-oldest .newest
