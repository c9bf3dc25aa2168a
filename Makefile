# make demo   fine-tune a small Qwen3.5 on the kernel and generate from it
# make test   every test that this machine can run
#
# Both set up a virtual environment first. VENV=<folder> puts it elsewhere; VENV= (empty) uses the present Python as it
# is and installs nothing, so that both work without a network.

PYTHON3 ?= python3
VENV ?= .venv
FLOOR_VENV ?= .venv-floor
BUILD_VENV ?= .venv-build

in_venv = $(if $(1),$(1)/bin/python,$(PYTHON3))
stamp = $(if $(1),$(1)/.installed-$(shell cksum < requirements/$(2).txt | cut -d' ' -f1))

PYTHON = $(call in_venv,$(VENV))
FLOOR_PYTHON = $(call in_venv,$(FLOOR_VENV))
BUILD_PYTHON = $(call in_venv,$(BUILD_VENV))
MAIN_STAMP = $(call stamp,$(VENV),main)
FLOOR_STAMP = $(call stamp,$(FLOOR_VENV),floor)
BUILD_STAMP = $(call stamp,$(BUILD_VENV),build)
PYTEST_ARGS ?=

# Values, gradients, packing, refusals, the ops and the way to the compiled kernels: under three minutes.
VARIANT_TESTS = $(addprefix tests/core/test_,capability.py field_values.py packing.py refusals.py sm90_path.py compile.py convolution.py norm.py)

.PHONY: help demo test test-floor test-build test-variant check build verify-build lint format

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -5

demo: $(MAIN_STAMP)
	$(PYTHON) -m flashqla_hub demo $(ARGS)

test: $(MAIN_STAMP)
	$(PYTHON) -m pytest $(PYTEST_ARGS)

# The tests of what depends on the versions of transformers and kernels, on the oldest supported pair.
test-floor: $(FLOOR_STAMP)
	$(FLOOR_PYTHON) -m pytest tests/transformers tests/trainer tests/hub $(PYTEST_ARGS)

# The tests of what is compiled: gates, bytes, launches against a fake driver. With the compilers, without a GPU.
test-build: $(BUILD_STAMP)
	$(BUILD_PYTHON) -m pytest tests/compile tests/launch $(PYTEST_ARGS)

build: $(BUILD_STAMP)
	$(BUILD_PYTHON) -m flashqla_hub build

# What strangers with a CUDA wheel get: the variant of this processor, loaded from its folder, serves CPU tensors too.
CUDA_VARIANT = build/torch-stable-abi29-cu130-$(shell uname -m)-linux
test-variant: $(MAIN_STAMP)
	@test -d $(CUDA_VARIANT) || { echo "$(CUDA_VARIANT) is not there; run make build"; exit 1; }
	FLASHQLA_TEST_VARIANT=$(CUDA_VARIANT) $(PYTHON) -m pytest $(VARIANT_TESTS) $(PYTEST_ARGS)

# Compile every library anew and compare it byte for byte with the one in build/.
verify-build: $(BUILD_STAMP)
	$(BUILD_PYTHON) -m flashqla_hub check --recompile

check: $(MAIN_STAMP)
	$(PYTHON) -m flashqla_hub check

lint: $(MAIN_STAMP)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

format: $(MAIN_STAMP)
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

define install
	$(PYTHON3) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed; set PYTHON3=<path>.")'
	$(PYTHON3) -m venv $(1)
	$(1)/bin/python -m pip install --quiet --disable-pip-version-check $(foreach name,$(2),-r requirements/$(name).txt)
	rm -f $(1)/.installed-*
	touch $@
endef

ifneq ($(VENV),)
$(MAIN_STAMP): requirements/main.txt
	$(call install,$(VENV),main)
endif

ifneq ($(BUILD_VENV),)
$(BUILD_STAMP): requirements/build.txt requirements/main.txt
	$(call install,$(BUILD_VENV),main build)
endif

ifneq ($(FLOOR_VENV),)
$(FLOOR_STAMP): requirements/floor.txt
	$(call install,$(FLOOR_VENV),floor)
endif
