# Each target makes the virtual environment .venv if it is not there. PYTHON names the Python that makes it.
PYTHON ?= python3
BIN := .venv/bin

# kernels/ in the working directory must not shadow a package of that name.
export PYTHONSAFEPATH := 1

.DEFAULT_GOAL := help
.PHONY: help install build demo test test-full wheel bench verify try performance golden inspect tune docs check format clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install:  ## the environment .venv with this checkout in it, native code built
	@$(PYTHON) bench/tools/install.py

build: install  ## the same; afterwards it compiles only what changed

demo:  ## install, then see it work: kernels and models checked and timed beside PyTorch
	@PYTRANSFORMER_CPU_ISAS=native PYTRANSFORMER_CUDA_ARCHS=native $(PYTHON) bench/tools/install.py --extras bench,models,hf
	$(BIN)/python bench/tools/step_time.py --seconds 2
	$(BIN)/python bench/tools/demo.py

test:  ## install, then the test suite in parts with time budgets (under 40 minutes)
	@$(PYTHON) tests/run_parts.py

test-full:  ## every test, slow ones too; PARTS="cpu generic": those parts
	@$(PYTHON) tests/run_parts.py --full $(PARTS)

wheel:  ## what is published, into dist/: an sdist and manylinux wheels for every CPU and GPU (12 minutes); ARGS="--archs sm_90a"
	@$(PYTHON) bench/tools/install.py --extras release
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/python bench/tools/wheel.py $(ARGS)

bench: install  ## the benchmark suite
	$(BIN)/pytransformer bench

verify: install  ## check and time every backend on this machine, in child processes; the results are stored and used
	$(BIN)/pytransformer verify $(ARGS)

try: install  ## OP=attention: the tests of an op, then, if they pass, its times; ARGS="--dtype bf16" goes to the benchmark
	$(BIN)/python bench/tools/test_then_time.py $(OP) $(ARGS)

CPP_FILES := $(shell find csrc tests/cuda tests/emulator tests/cpu -name "*.cpp" -o -name "*.h" -o -name "*.cu" -o -name "*.cuh")

performance: install  ## run the suite and all else that docs/performance.md tells (25 minutes), then write it and README's table
	@$(PYTHON) bench/tools/install.py --extras bench,models,hf
	$(BIN)/python bench/tools/performance.py --run

golden: install  ## measure every op's error norms beside naive code and PyTorch, and write the table of docs/accuracy.md
	$(BIN)/python bench/tools/golden.py --run

inspect: install  ## what the GPU kernels take (registers, spills, shared memory, instructions); ARGS="--op attention --arch 90"
	$(BIN)/python bench/tools/inspect_kernels.py $(ARGS)

tune: install  ## on a GPU: measure the Triton kernels' configurations, write kernels/tuned/<gpu>/
	$(BIN)/python bench/tools/tune.py

docs:  ## the documentation site, with an API reference and search, into build/site
	@$(PYTHON) bench/tools/install.py --extras docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

check:  ## formatting, lint, types and layout
	@$(PYTHON) bench/tools/install.py --extras test,dev
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy
	$(BIN)/clang-format --dry-run -Werror $(CPP_FILES)
	$(BIN)/python -m pytest -q tests/test_layout.py

format:  ## rewrite Python and C++ in the project's format
	@$(PYTHON) bench/tools/install.py --extras test,dev
	$(BIN)/python -m ruff format .
	$(BIN)/python -m ruff check --fix .
	$(BIN)/clang-format -i $(CPP_FILES)

clean:  ## remove what was built, the environment too
	rm -rf build dist .venv *.egg-info pytransformer/*.so pytransformer/_build_info.json
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
