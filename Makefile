# One command each: setup, train, test, bench, docs, lint, format. CONTRIBUTING.md explains them.
#
# What is set up already is remembered in .venv/.stamps, in files named by a digest of the inputs.
# A step runs again when an input's content changes, not when a checkout touches its time.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
# The steps share one environment and one build tree, so never run two of them at once.
.NOTPARALLEL:

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
INSTALL := $(PIP) install --constraint constraints.txt
# The editable install builds with the environment's own setuptools: quick, and no download.
INSTALL_SELF := $(INSTALL) --no-build-isolation --editable
STAMPS := $(VENV)/.stamps

NATIVE_SOURCES := CMakeLists.txt setup.py $(shell find hvd_compress/csrc -type f 2>/dev/null | sort)
OPERATIONS_SOURCES := hvd_compress/tensorflow/build.py $(shell find hvd_compress/tensorflow/ops -type f | sort)
CPP_FILES := $(shell find hvd_compress/csrc hvd_compress/tensorflow/ops tests/native -name '*.h' -o -name '*.cc' -o -name '*.cu' \
  2>/dev/null | sort)

# $(call stamp,NAME,INPUTS): a file that exists if NAME was done with these inputs.
stamp = $(STAMPS)/$(1)-$(shell cat $(2) | sha256sum | cut -c 1-16)
# Leaves one stamp a name: after a change and its reversal the step has to run again.
done = @rm -f $(STAMPS)/$(1)-* && touch $@

VENV_READY := $(STAMPS)/venv
FRAMEWORKS := $(call stamp,frameworks,constraints.txt)
HOROVOD := $(call stamp,horovod,constraints.txt scripts/horovod_wheel.py)
PACKAGE := $(call stamp,package,constraints.txt setup.cfg setup.py pyproject.toml)
NATIVE := $(call stamp,native,$(NATIVE_SOURCES) <(echo '$(CMAKE_ARGS) $(HVDC_CUDA)'))
OPERATIONS := $(call stamp,operations,constraints.txt $(NATIVE_SOURCES) $(OPERATIONS_SOURCES))
DOCS := $(call stamp,docs,constraints.txt setup.cfg)
LINT := $(call stamp,lint,constraints.txt setup.cfg)

# Programs are found in the environment first: tests and benchmarks start horovodrun and python.
IN_VENV := PATH="$(CURDIR)/$(VENV)/bin:$$PATH"

.PHONY: help setup native train test bench gpu-check docs lint format clean distclean

help:
	@echo 'make setup   everything below needs; quick when nothing changed'
	@echo 'make train   train on two ranks with every codec, compare in one table (FRAMEWORK=tensorflow, keras)'
	@echo 'make test    run all tests (ARGS="..." goes to pytest)'
	@echo 'make bench   measure the codecs'
	@echo 'make gpu-check  on a machine with a GPU: build, test, measure (WHEELS=folder)'
	@echo 'make docs    build the documentation in build/docs'
	@echo 'make lint    check style and types; make format repairs what can be repaired'
	@echo 'make clean   remove what was built; make distclean also the environment'

setup: $(NATIVE) $(OPERATIONS)

$(VENV_READY):
	@command -v cmake >/dev/null || { echo 'cmake is missing: install it first' >&2; exit 1; }
	@test -n '$(PYTHON)' || { echo 'Python 3.11 is missing: install it first' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo 'expected Python 3.11 or newer, got' "$$($(PYTHON) --version)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(FRAMEWORKS): | $(VENV_READY)
	$(INSTALL) setuptools numpy torch tensorflow-cpu
	@# It asks for a distribution called tensorflow, which would overwrite tensorflow-cpu.
	$(INSTALL) --no-deps tf_keras
	$(call done,frameworks)

# A wheel of the same version but another build would count as installed, hence the uninstall.
$(HOROVOD): $(FRAMEWORKS)
	wheel=$$($(PY) scripts/horovod_wheel.py --frameworks torch,tensorflow) \
	  && $(PIP) uninstall --quiet --yes horovod \
	  && $(INSTALL) "$$wheel"
	$(call done,horovod)

$(PACKAGE): $(HOROVOD)
	$(INSTALL_SELF) '.[torch,tensorflow,test,benchmarks]'
	$(call done,package)

# The editable install built the library; from then on only what changed is compiled.
$(NATIVE): $(PACKAGE)
	$(PY) setup.py --quiet build_ext --inplace
	$(call done,native)

# TensorFlow's operations are compiled into a cache when they are first used, or here.
$(OPERATIONS): $(NATIVE)
	$(PY) -m hvd_compress.tensorflow.build >/dev/null
	$(call done,operations)

native: $(NATIVE) $(OPERATIONS)

train: setup
	$(IN_VENV) $(PY) -m benchmarks.main_job $(if $(FRAMEWORK),--framework $(FRAMEWORK)) \
	  --out build/train$(FRAMEWORK:%=-%)

test: setup
	$(IN_VENV) MPLBACKEND=Agg $(PY) -m pytest $(ARGS)

bench: setup
	@mkdir -p build
	$(IN_VENV) $(PY) -m benchmarks.codec --json build/codec.json

# On a machine with a GPU, without a network: everything comes from the tree and a folder of wheels.
gpu-check:
	$(PYTHON) scripts/gpu_check.py $(if $(WHEELS),--wheels $(WHEELS)) $(ARGS)

$(DOCS): $(PACKAGE)
	$(INSTALL_SELF) '.[docs]'
	$(call done,docs)

docs: setup $(DOCS)
	$(PY) -m sphinx -W --keep-going -b html docs build/docs

$(LINT): $(PACKAGE)
	$(INSTALL_SELF) '.[lint]'
	$(call done,lint)

lint: setup $(LINT)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(if $(CPP_FILES),$(VENV)/bin/clang-format --dry-run -Werror $(CPP_FILES))

format: setup $(LINT)
	$(VENV)/bin/ruff check --fix --exit-zero .
	$(VENV)/bin/ruff format .
	$(if $(CPP_FILES),$(VENV)/bin/clang-format -i $(CPP_FILES))

clean:
	rm -rf build dist *.egg-info hvd_compress/lib .pytest_cache .hypothesis .mypy_cache .ruff_cache
	rm -f $(STAMPS)/package-* $(STAMPS)/native-*

distclean: clean
	rm -rf $(VENV)
