# Needs python3 (3.10 or newer) and make. `make test VENV=/some/folder` uses another environment.
VENV ?= .venv
PYTHON ?= python3

PY := $(VENV)/bin/python
# One file pins the packages and, for pip's isolated builds, the build backend.
PIP_ENV := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1

.PHONY: install demo test test-all test-torch conformance test-trl test-peft test-vllm test-wheel verify-types dist reliability mutants randomness pages outputs bench models gpu lint types docs notebooks clean

install: $(VENV)/.installed-dev

# One rule for every extra: `.installed-dev` stands for `pip install -e ".[dev]"`.
$(VENV)/.installed-%: pyproject.toml constraints.txt | $(PY)
	$(PIP_ENV) $(PY) -m pip install -q -c constraints.txt -e ".[$*]"
	@touch $@

$(PY):
	$(PYTHON) -m venv $(VENV)

# An environment with everything serves the demo too; without one, only the extra [demo] is installed.
demo: $(if $(wildcard $(VENV)/.installed-dev),install,$(VENV)/.installed-demo)
	$(PY) -m tdfunc.demo

# One torch thread for each of xdist's processes.
test: install
	OMP_NUM_THREADS=1 $(PY) -m pytest -n auto -q

test-all: install
	OMP_NUM_THREADS=1 $(PY) -m pytest -n auto -q -m ""

# The fast tests on another torch, in a separate environment (several GB): `make test-torch VERSION=2.14.1`.
test-torch: $(VENV)/torch-$(VERSION)/.installed
	OMP_NUM_THREADS=1 $(VENV)/torch-$(VERSION)/bin/python -m pytest -n auto -q -W default

# Without the pins of torch and of what it pins itself.
$(VENV)/torch-$(VERSION)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)/torch-$(VERSION)
	sed -E '/^(torch|sympy|networkx|fsspec|setuptools|triton)==/d' constraints.txt > $(VENV)/torch-$(VERSION)/constraints.txt
	PIP_DISABLE_PIP_VERSION_CHECK=1 $(VENV)/torch-$(VERSION)/bin/python -m pip install -q \
		-c $(VENV)/torch-$(VERSION)/constraints.txt torch==$(VERSION) -e ".[dev]"
	@touch $@

# Losses of language models next to TRL's.
test-trl: $(VENV)/trl/.installed
	PYTHONPATH=$(VENV)/trl OMP_NUM_THREADS=1 $(PY) -m pytest -q -m slow benchmarks/conformance/test_trl.py

# Adapters next to PEFT's: its folders, ours in it, and 64 runs of it.
test-peft: $(VENV)/peft/.installed
	PYTHONPATH=$(VENV)/peft OMP_NUM_THREADS=1 $(PY) -m pytest -q -m slow benchmarks/conformance/test_peft.py

# Runs next to tensordict, `torch.func` and `torch.optim`, and the tests of the programs of benchmarks/; random
# operations and the page of names next to a newer tensordict, too.
conformance: install $(VENV)/tensordict-newer/tensordict
	OMP_NUM_THREADS=1 $(PY) -m pytest -n auto -q -m "" benchmarks --ignore=benchmarks/pages
	PYTHONPATH=$(VENV)/tensordict-newer OMP_NUM_THREADS=1 $(PY) -m pytest -n auto -q -m "" \
		benchmarks/pages benchmarks/conformance/test_differential.py benchmarks/conformance/test_blocks.py \
		benchmarks/conformance/test_documented.py

# Kills, full disks, damage and fuzzing, counted: more than an hour. `make reliability PARTS="kills damage"` counts some.
reliability: install
	OMP_NUM_THREADS=1 $(PY) -m benchmarks.reliability $(PARTS)

# Small changes to the code, and whether a test notices each: an hour for 400 changes.
mutants: install $(VENV)/.installed-mutants
	OMP_NUM_THREADS=1 $(PY) -m benchmarks.mutants --seed $(or $(SEED),1) --files $(or $(FILES),100) --each 4

# Streams of random keys in dieharder, counted: half an hour. `make randomness STREAMS="one_key weyl"` counts some.
randomness: install
	OMP_NUM_THREADS=1 $(PY) -m benchmarks.randomness $(STREAMS)

# The pages of docs/ that hold tables and lists of names.
pages: install $(VENV)/tensordict-newer/tensordict
	PYTHONPATH=$(VENV)/tensordict-newer $(PY) -m benchmarks.pages

# The pinned tensordict is the one that the targets were set against; a newer one is measured next to it.
NEWER := tensordict==0.15.3
# TRL and the packages that it imports, next to those of this environment.
TRL := trl==1.16.0 datasets==5.2.0 pyarrow==26.0.1 dill==0.4.1 multiprocess==0.70.19
PEFT := peft==0.21.2
# Rivals of the training steps, in an environment of their own.
JAX := jax==0.10.2 equinox==0.13.8 flax==0.12.8 optax==0.2.8

# Models of torch.nn and transformers, next to loops over them, and the tables of docs/models.md: ten minutes.
# `make models ARGS="--rows torch.nn --third 0"` runs some of them.
models: install
	OMP_NUM_THREADS=1 $(PY) -m benchmarks.models $(or $(ARGS),--speed)

# `make bench PARTS="training nn"` measures some parts again; the page has the kept numbers of the others.
bench: install $(VENV)/tensordict-newer/tensordict $(VENV)/jax/.installed
	$(PY) -m benchmarks $(if $(PARTS),--only $(PARTS))

# On a machine with a GPU: the tests on it, then the rows of docs/benchmarks.md, in less than ten minutes. It installs
# nothing; GPU_PYTHON has a CUDA build of torch, transformers, pytest, pytest-timeout and hypothesis.
GPU_PYTHON ?= $(if $(wildcard $(PY)),$(PY),$(PYTHON))
NEEDS := hypothesis, optree, pytest, pytest_timeout, safetensors, torch, transformers, xxhash

gpu:
	$(GPU_PYTHON) -c 'import $(NEEDS); torch.cuda.is_available() or exit("make gpu: torch must find a CUDA device.")'
	status=0; $(GPU_PYTHON) -m pytest -q -W default -m gpu tests/gpu || status=$$?; \
		$(GPU_PYTHON) -m benchmarks.gpu || status=$$?; exit $$status

$(VENV)/jax/.installed: Makefile | install
	rm -rf $(VENV)/jax
	$(PYTHON) -m venv $(VENV)/jax
	PIP_DISABLE_PIP_VERSION_CHECK=1 $(VENV)/jax/bin/python -m pip install -q $(JAX)
	@touch $@

$(VENV)/trl/.installed: Makefile | install
	rm -rf $(VENV)/trl
	PIP_DISABLE_PIP_VERSION_CHECK=1 $(PY) -m pip install -q --no-deps --target $(VENV)/trl $(TRL)
	@touch $@

$(VENV)/peft/.installed: Makefile | install
	rm -rf $(VENV)/peft
	PIP_DISABLE_PIP_VERSION_CHECK=1 $(PY) -m pip install -q --no-deps --target $(VENV)/peft $(PEFT)
	@touch $@

$(VENV)/tensordict-newer/tensordict: Makefile | install
	rm -rf $(VENV)/tensordict-newer
	PIP_DISABLE_PIP_VERSION_CHECK=1 $(PY) -m pip install -q --no-deps --target $(VENV)/tensordict-newer $(NEWER)
	@touch $@

# vLLM itself on the CPU, in an environment of its own (2.5 GB), next to transformers and over HTTP.
test-vllm: $(VENV)/vllm/.installed
	OMP_NUM_THREADS=1 $(VENV)/vllm/bin/python -m pytest -q tests/engines -W default

$(VENV)/vllm/.installed: Makefile tests/engines/requirements.txt
	rm -rf $(VENV)/vllm
	$(PYTHON) -m venv $(VENV)/vllm
	$(PIP_ENV) $(VENV)/vllm/bin/python -m pip install -q torch
	PIP_DISABLE_PIP_VERSION_CHECK=1 $(VENV)/vllm/bin/python -m pip install -q --no-deps -r tests/engines/requirements.txt
	@touch $@

# The wheel and the source archive, their metadata, and the wheel in environments without the clone.
BUILDERS := build==1.6.1 twine==7.0.0 check-wheel-contents==0.6.3
test-wheel: dist
	rm -rf $(VENV)/wheel
	$(PYTHON) -m venv $(VENV)/wheel
	PIP_CONSTRAINT=constraints.txt $(VENV)/wheel/bin/python -m pip install -q dist/*.whl
	$(VENV)/wheel/bin/python tests/release/wheel.py bare
	PIP_CONSTRAINT=constraints.txt $(VENV)/wheel/bin/python -m pip install -q "$$(echo dist/*.whl)[demo,llm,cli]"
	OMP_NUM_THREADS=1 $(VENV)/wheel/bin/python tests/release/wheel.py full

# The types of all public symbols, as an editor reads them from the installed wheel.
verify-types: install dist
	test -d $(VENV)/wheel || $(PYTHON) -m venv $(VENV)/wheel
	PIP_CONSTRAINT=constraints.txt $(VENV)/wheel/bin/python -m pip install -q "$$(echo dist/*.whl)[demo,llm,cli]"
	$(VENV)/wheel/bin/python -m pip install -q --no-deps --force-reinstall dist/*.whl
	$(VENV)/wheel/bin/python tests/release/wheel.py types $(abspath $(PY))

dist: $(VENV)/builders/.installed
	rm -rf dist
	$(PIP_ENV) $(VENV)/builders/bin/python -m build -o dist .
	$(VENV)/builders/bin/twine check --strict dist/*
	$(VENV)/builders/bin/check-wheel-contents dist/*.whl

$(VENV)/builders/.installed: Makefile | $(PY)
	rm -rf $(VENV)/builders
	$(PYTHON) -m venv $(VENV)/builders
	PIP_DISABLE_PIP_VERSION_CHECK=1 $(VENV)/builders/bin/python -m pip install -q $(BUILDERS)
	@touch $@

lint: install
	$(PY) -m ruff format --check
	$(PY) -m ruff check

types: install
	$(PY) -m pyright --pythonpath $(PY)

# Checks that the notebooks run; `make outputs` runs them and the example programs and keeps their outputs.
notebooks: install
	$(PY) -m pytest --nbmake notebooks -q

outputs: install
	$(PY) -m benchmarks.pages.notebooks
	$(PY) -m benchmarks.pages.gallery

docs: install
	$(PY) -m mkdocs build --strict

clean:
	rm -rf $(VENV) .cache .hypothesis .pytest_cache .ruff_cache build demo-output dist site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
