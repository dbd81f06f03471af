# Everything runs in .venv, and with MindSpore in .venv-mindspore; the targets make and fill them themselves, and stamps in
# them keep repeated runs short.
#
#   PYTHON         the Python to make .venv with (3.10 or newer)
#   CXX            the C++20 compiler
#   WERROR         ON: a warning fails the C++ test build
#   TORCH_VERSION  what to install where .venv has no supported torch yet
#   JOBS           how many compilers and C++ tests run at a time
#   TEST_JOBS      how many processes share the Python tests of a framework and device

.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.NOTPARALLEL:

PYTHON ?= python3
ifeq ($(origin CXX),default)
CXX := c++
endif
WERROR ?= ON
TORCH_VERSION ?= 2.13.0
JOBS ?= $(shell nproc 2>/dev/null || echo 2)
# A file of tests is not divided, and loading a framework is not free: more than a few gain nothing.
TEST_JOBS ?= $(shell echo $$(($(JOBS) < 8 ? $(JOBS) : 8)))
export PYTHON CXX

VENV := .venv
BIN := $(VENV)/bin
MINDSPORE := .venv-mindspore
PEERS := .venv-peers
PIP := $(BIN)/python -m pip --disable-pip-version-check
# One build tree per compiler: CMake cannot change it in place.
BUILD := build/$(notdir $(lastword $(CXX)))

STUB := python/ebbtide/_core.pyi
# Folders too: their time changes when a file comes or goes.
PACKAGE_FILES := pyproject.toml CMakeLists.txt \
  $(shell find include src bindings python -not -name __pycache__ -not -name '*.pyc' -not -name '.*')
CXX_FILES = $(shell find include src bindings tests benchmarks examples -name '*.h' -o -name '*.cc')

##@ What you will want

.PHONY: demo demo-mindspore test test-full bench peers
demo: $(VENV)/.torch $(VENV)/.demo-deps build ## Set up, build, install and run `ebbtide demo`
	$(BIN)/ebbtide demo

demo-mindspore: $(MINDSPORE)/.installed ## The same with MindSpore, in .venv-mindspore
	@$(call if_mindspore,$(MINDSPORE)/bin/ebbtide demo --framework mindspore,exit 1)

test: lint test-cpp test-cpp-sanitize stubs-check typecheck test-device test-mindspore test-python ## All checks but the slow ones; ends with pytest's summary

test-full: PYTEST_OPTIONS :=
test-full: lint test-cpp test-cpp-sanitize test-cpp-thread stubs-check typecheck test-device test-mindspore test-python ## `make test`, thread sanitizer and slow tests

bench: build $(VENV)/.torch $(VENV)/.demo-deps $(PEERS)/.installed ## Benchmarks: core, host time per saved tensor, the demo in pairs, step times on a virtual clock, copies
	tools/system_packages.sh benchmark
	$(call cmake_build,bench,-DCMAKE_BUILD_TYPE=Release -DEBBTIDE_BUILD_BENCHMARKS=ON)
	$(BUILD)/bench/benchmarks/ebbtide_benchmarks
	$(BIN)/python benchmarks/host_time.py
	$(BIN)/python benchmarks/demo_pairs.py
	$(BIN)/python benchmarks/step_time.py
	$(BIN)/python benchmarks/copies.py
	$(PEERS)/bin/python benchmarks/host_time_device.py

peers: build $(VENV)/.torch $(VENV)/.demo-deps $(PEERS)/.installed ## Activation offloaders side by side on the test device; fills docs/peers.md
	PYTHONPATH=benchmarks $(PEERS)/bin/python -m peers --json build/peers.json --docs docs/peers.md

##@ Parts

.PHONY: build lint typecheck stubs-check test-cpp test-cpp-sanitize test-cpp-thread test-device \
  test-mindspore test-python
build: $(VENV)/.installed ## Build the wheel and install it into .venv

lint: $(VENV)/.dev-deps ## Include directions, clang-format, ruff
	$(BIN)/python tools/check_includes.py
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

typecheck: $(VENV)/.dev-deps ## mypy
	$(BIN)/mypy

stubs-check: build $(VENV)/.dev-deps ## Fail if the checked-in stub is not what the bindings give
	$(call write_stub,$(BUILD)/_core.pyi)
	diff -u $(STUB) $(BUILD)/_core.pyi || { echo "$(STUB) is out of date: run 'make stubs'" >&2; exit 1; }

test-cpp: cpp-deps ## C++ tests
	$(call cmake_build,plain,-DCMAKE_BUILD_TYPE=RelWithDebInfo -DEBBTIDE_BUILD_TESTS=ON -DEBBTIDE_WERROR=$(WERROR))
	$(call run_ctest,plain)

test-cpp-sanitize: cpp-deps ## C++ tests under the address and undefined behaviour sanitizers
	$(call cmake_build,sanitize,$(SANITIZED) -DEBBTIDE_SANITIZE=address,undefined)
	$(call run_ctest,sanitize)

test-cpp-thread: cpp-deps ## C++ tests under the thread sanitizer
	$(call cmake_build,thread,$(SANITIZED) -DEBBTIDE_SANITIZE=thread)
	$$(setarch -R true 2>/dev/null && echo setarch -R) $(call run_ctest,thread)

PYTEST_OPTIONS = -m "not slow"
# In the order that tests/python/conftest.py gives, not in that of the number of tests.
WORKERS = -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder
PYTEST = -m pytest $(if $(filter-out 0 1,$(TEST_JOBS)),$(WORKERS)) $(PYTEST_OPTIONS)
PYTEST_DEPS := build $(VENV)/.torch $(VENV)/.demo-deps $(VENV)/.dev-deps
test-device: $(PYTEST_DEPS) ## Python tests on the test device, a process of their own
	EBBTIDE_TEST_BACKEND=torch-tide $(BIN)/python $(PYTEST)

test-mindspore: $(MINDSPORE)/.installed $(VENV)/.created ## Python tests with MindSpore on the CPU, a process of their own
	@$(call if_mindspore,EBBTIDE_TEST_BACKEND=mindspore-cpu $(MINDSPORE)/bin/python $(PYTEST),\
	  $(BIN)/python tools/behaviour_table.py --unavailable mindspore-cpu "$$(cat $(MINDSPORE)/mindspore-unavailable)")

test-python: $(PYTEST_DEPS) ## Python tests on the CPU but the slow ones; says what ran for which framework
	EBBTIDE_BEHAVIOUR_TABLE=1 $(BIN)/python $(PYTEST)

##@ Upkeep

.PHONY: format stubs clean distclean help
format: $(VENV)/.dev-deps ## Format C++ and Python, apply ruff's safe fixes
	$(BIN)/clang-format -i $(CXX_FILES)
	$(BIN)/ruff check --fix --exit-zero .
	$(BIN)/ruff format .

stubs: build $(VENV)/.dev-deps ## Write python/ebbtide/_core.pyi anew from the built bindings
	$(call write_stub,$(STUB))

clean: ## Remove builds and caches
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find python tests tools -name __pycache__ -prune -exec rm -rf {} +

distclean: clean ## `make clean`, and .venv and its like too
	rm -rf $(VENV) $(MINDSPORE) $(PEERS)

help: ## This list
	@awk 'BEGIN { FS = ":.*## " } /^##@/ { print "\n" substr($$0, 5) } \
	  /^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# --- how -----------------------------------------------------------------------------------------

# Sanitized builds keep assertions, which the plain build, like the wheel, has compiled out.
SANITIZED := -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG="-g -O1" -DEBBTIDE_BUILD_TESTS=ON

# $(1) build folder, $(2) options
define cmake_build
$(BIN)/cmake --log-level=NOTICE -S . -B $(BUILD)/$(1) -G Ninja -DCMAKE_MAKE_PROGRAM=$(abspath $(BIN)/ninja) $(2)
$(BIN)/cmake --build $(BUILD)/$(1) --parallel $(JOBS)
endef

run_ctest = $(BIN)/ctest --test-dir $(BUILD)/$(1) --output-on-failure --no-tests=error --parallel $(JOBS)

# $(1) stub to write
define write_stub
mkdir -p $(dir $(1))
$(BIN)/python -m nanobind.stubgen -q -m ebbtide._core -o $(1)
endef

# $(1) what to run if there is a MindSpore, $(2) else
if_mindspore = if test -e $(MINDSPORE)/mindspore-unavailable; then cat $(MINDSPORE)/mindspore-unavailable >&2; $(2); else $(1); fi

# $(1) requirement sets of pyproject.toml, $(2) further requirements
install_requirements = $(BIN)/python tools/requirements.py $(1) >$@.txt && $(PIP) install --quiet -r $@.txt $(2)

$(VENV)/.created:
	tools/system_packages.sh python compiler
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) install --quiet --upgrade pip
	touch $@

$(VENV)/.build-deps: pyproject.toml tools/requirements.py | $(VENV)/.created
	$(call install_requirements,build,cmake ninja)
	touch $@

$(VENV)/.torch: tools/install_torch.py | $(VENV)/.created
	$(BIN)/python tools/install_torch.py --version $(TORCH_VERSION)
	touch $@

$(VENV)/.demo-deps: pyproject.toml tools/requirements.py | $(VENV)/.created
	$(call install_requirements,runtime demo)
	touch $@

$(VENV)/.dev-deps: pyproject.toml tools/requirements.py | $(VENV)/.created
	$(call install_requirements,test dev)
	touch $@

$(VENV)/.runtime-deps: pyproject.toml tools/requirements.py | $(VENV)/.created
	$(call install_requirements,runtime)
	touch $@

# Built once, installed into every environment.
$(BUILD)/dist/.built: $(PACKAGE_FILES) $(VENV)/.build-deps
	rm -rf $(BUILD)/dist
	$(PIP) wheel --quiet --no-build-isolation --no-deps --wheel-dir $(BUILD)/dist \
	  --config-settings=build-dir=$(BUILD)/wheel .
	touch $@

install_wheel = $(1)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --force-reinstall $(BUILD)/dist/*.whl

$(VENV)/.installed: $(BUILD)/dist/.built $(VENV)/.runtime-deps
	$(call install_wheel,$(VENV))
	touch $@

$(MINDSPORE)/.created:
	tools/system_packages.sh python
	$(PYTHON) -m venv --clear $(MINDSPORE)
	echo '*' >$(MINDSPORE)/.gitignore
	$(MINDSPORE)/bin/python -m pip install --quiet --upgrade pip
	touch $@

# Where there is no MindSpore this is tried again each time: no stamp. What the tests need comes with it.
$(MINDSPORE)/.mindspore: pyproject.toml tools/install_mindspore.py tools/requirements.py | $(MINDSPORE)/.created
	$(MINDSPORE)/bin/python tools/install_mindspore.py
	test -e $(MINDSPORE)/mindspore-unavailable || touch $@

$(MINDSPORE)/.installed: $(BUILD)/dist/.built | $(MINDSPORE)/.mindspore
	$(call if_mindspore,$(call install_wheel,$(MINDSPORE)),true)
	touch $@

# On top of .venv, whose packages it sees: what is compared runs on the torch that is in use.
$(PEERS)/.installed: benchmarks/peers/requirements.txt | $(VENV)/.created
	$(BIN)/python -m venv --clear $(PEERS)
	echo '*' >$(PEERS)/.gitignore
	$(BIN)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' \
	  >$$($(PEERS)/bin/python -c 'import site; print(site.getsitepackages()[0])')/base.pth
	$(PEERS)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -r $<
	touch $@

.PHONY: cpp-deps
cpp-deps: $(VENV)/.build-deps
	@tools/system_packages.sh gtest
