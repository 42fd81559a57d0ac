# Each target first makes ready what it needs (tools/setup.sh); only Python 3.11+, make and a C++ compiler must be there.
# ARGS goes to the program:  make serve ARGS="--port 8080"   make test ARGS="tests/core -x"

RUN   := tools/setup.sh uv run
TESTS := tools/setup.sh --cluster uv run
CHECK := tools/setup.sh --no-llama uv run
ARGS  ?=

# Images of containers set it; every process would then compile the modules again that it imports.
unexport PYTHONDONTWRITEBYTECODE

# Three processes, because many tests wait; each runs the tests of one file after another. In one process: ARGS="-n 0".
# Two in make check, whose tests do not wait: each process takes ten seconds to import them.
PYTEST := pytest -n 3 --dist loadfile --no-loadscope-reorder

# What make bench measures with and against.
MODEL := models/qwen3-0.6b.gguf
PEER  := .tools/peers/build/bin/llama-batched-bench

.PHONY: help serve check test test-all models browser torch coverage lint format bench reliability soak docs site wheels
.DEFAULT_GOAL := help

help: ## show this list
	@sed -n 's/^\([a-z-]*\):[a-z ]*## /  make \1\t/p; s/^# ARGS/ARGS/p' $(MAKEFILE_LIST)

serve: ## start the server with the built-in model
	@exec $(RUN) cllm serve $(ARGS)

check: lint ## before each commit, 3 minutes on two cores: linters, types, the quick tests (no server, no llama.cpp)
	@CLLM_QUICK_TESTS=1 $(CHECK) $(PYTEST) -n 2 -m "not server and not slow and not llama" $(ARGS)

test: ## before a change is merged, 25 minutes on two cores: all tests, with few repetitions
	@exec $(TESTS) $(PYTEST) $(ARGS)

test-all: ## before a release: all tests, with all repetitions and those marked full
	@CLLM_FULL_TESTS=1 $(TESTS) $(PYTEST) $(ARGS)

browser: ## fetch Chromium for the tests of the page, unless it is installed: Playwright's, else Debian's if you are root
	@command -v chromium >/dev/null || $(CHECK) timeout 600 playwright install --with-deps chromium \
	  || { apt-get update -qq && apt-get install -qq --no-install-recommends chromium; }

models: ## fetch two trained models (350 MB) for the tests marked real, and for measurements
	@exec $(CHECK) python tools/real_models.py

torch: ## fetch PyTorch for CPUs (200 MB, 750 MB installed) and transformers for the tests marked torch
	@exec tools/setup.sh --torch true

coverage: ## run all tests in one process and show the lines that none of them reaches
	@exec $(TESTS) pytest --cov=cllm --cov-report=term-missing:skip-covered $(ARGS)

lint: ## lint, format check, types, the workflows of GitHub
	@$(CHECK) ruff check
	@$(CHECK) ruff format --check
	@$(CHECK) mypy
	@$(CHECK) actionlint

format: ## rewrite the sources in the house format
	@$(CHECK) ruff format
	@$(CHECK) ruff check --fix

bench: ## measure what the engine adds to llama.cpp; makes what it needs for that
	@[ -e $(MODEL) ] || { mkdir -p models && $(RUN) cllm bench make-model --shape qwen3-0.6b --quant q4_k_m $(MODEL); }
	@[ -e $(PEER) ] || $(RUN) python benchmarks/build_peers.py
	@mkdir -p .tools/bench
	@exec $(RUN) cllm bench compare $(MODEL) --rows engine-1 engine-8 engine-32 \
	  --store .tools/bench/rounds.jsonl --out .tools/bench $(ARGS)

reliability: ## measure what docs/reliability.md promises and write that page; takes hours
	@exec $(RUN) python -m benchmarks.reliability --out docs/reliability.md $(ARGS)

MINUTES ?= 60
soak: ## run clients of all kinds and faults at once: make soak MINUTES=480
	@exec $(RUN) python -m benchmarks.reliability --only soak --minutes $(MINUTES) $(ARGS)

docs: ## derive the pages under docs/ that are made from the code, and build the site
	@$(RUN) cllm config docs > docs/configuration.md.new
	@mv docs/configuration.md.new docs/configuration.md
	@$(RUN) python tools/api_page.py > docs/api.md.new
	@mv docs/api.md.new docs/api.md
	@$(RUN) python tools/cli_page.py > docs/cli.md.new
	@mv docs/cli.md.new docs/cli.md
	@$(MAKE) site

site: ## build the site of the documentation into site/, which needs no network to be read
	@NO_MKDOCS_2_WARNING=1 tools/setup.sh --no-llama env -u UV_NO_SYNC \
	  uv run --only-group site --isolated mkdocs build --strict --quiet

wheels: ## build wheels that install without a compiler into dist/; compiles for 15 minutes and more
	@exec $(CHECK) python tools/build_wheels.py $(ARGS)
