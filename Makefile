# Each target first makes ready what it needs (tools/setup.sh); only Python 3.11+, make and a C++ compiler must be there.
# ARGS goes to the program:  make serve ARGS="--port 8080"   make test ARGS="tests/core -x"

RUN   := tools/setup.sh uv run
CHECK := tools/setup.sh --no-llama uv run
ARGS  ?=

# What make bench measures with and against.
MODEL := models/qwen3-0.6b.gguf
PEER  := .tools/peers/build/bin/llama-batched-bench

.PHONY: help serve test models check coverage lint format bench reliability soak docs site wheels
.DEFAULT_GOAL := help

help: ## show this list
	@sed -n 's/^\([a-z]*\):[a-z ]*## /  make \1\t/p' $(MAKEFILE_LIST)

serve: ## start the server with the built-in model
	@exec $(RUN) cllm serve $(ARGS)

test: ## run all tests, those that need llama.cpp too
	@exec $(RUN) pytest $(ARGS)

models: ## fetch two trained models (350 MB) for the tests marked real, and for measurements
	@exec $(CHECK) python tools/real_models.py

check: lint ## linters and the tests that need no llama.cpp: run it after every change
	@$(CHECK) pytest -m "not llama and not slow" $(ARGS)

coverage: ## run all tests and show the lines that none of them reaches
	@exec $(RUN) pytest --cov=cllm --cov-report=term-missing:skip-covered $(ARGS)

lint: ## lint, format check, types
	@$(CHECK) ruff check
	@$(CHECK) ruff format --check
	@$(CHECK) mypy

format: ## rewrite the sources in the house format
	@$(CHECK) ruff format
	@$(CHECK) ruff check --fix

bench: ## measure what the engine adds to llama.cpp; makes what it needs for that
	@[ -e $(MODEL) ] || { mkdir -p models && $(RUN) cllm bench make-model --shape qwen3-0.6b --quant q4_k_m $(MODEL); }
	@[ -e $(PEER) ] || $(RUN) python benchmarks/build_peers.py
	@exec $(RUN) python benchmarks/engine_overhead.py $(ARGS)

reliability: ## measure what docs/reliability.md promises and write that page; takes hours
	@exec $(RUN) python -m benchmarks.reliability --out docs/reliability.md $(ARGS)

MINUTES ?= 60
soak: ## run clients of all kinds and faults at once: make soak MINUTES=480
	@exec $(RUN) python -m benchmarks.reliability --only soak --minutes $(MINUTES) $(ARGS)

docs: ## derive the pages under docs/ that are made from the code, and build the site
	@$(RUN) cllm config docs > docs/configuration.md.new
	@mv docs/configuration.md.new docs/configuration.md
	@$(RUN) cllm config api > docs/api.md.new
	@mv docs/api.md.new docs/api.md
	@$(RUN) cllm config commands > docs/cli.md.new
	@mv docs/cli.md.new docs/cli.md
	@$(MAKE) site

site: ## build the site of the documentation into site/, which needs no network to be read
	@NO_MKDOCS_2_WARNING=1 tools/setup.sh --no-llama env -u UV_NO_SYNC \
	  uv run --only-group site --isolated mkdocs build --strict --quiet

wheels: ## build wheels that install without a compiler into dist/; compiles for 15 minutes and more
	@exec $(CHECK) python tools/build_wheels.py $(ARGS)
