# Every target makes .venv by itself when it is missing or older than pyproject.toml and constraints.txt.
#   PYTHON=...    the interpreter to make it with (python3.11 where there is one)
#   WORKERS=...   test processes
#   NO_VENV=1     use PYTHON as it stands, for example on a GPU machine without a network
PYTHON ?= $(shell python3.11 -c 'import sys; print(sys.executable)' 2>/dev/null || command -v python3)
WORKERS ?= 2

ifdef NO_VENV
PY := $(PYTHON)
MOE_LC := $(PY) -m modeling_moe_lc.training.cli
else
PY := .venv/bin/python
MOE_LC := .venv/bin/moe-lc
VENV := .venv/.installed
endif

.NOTPARALLEL:
.PHONY: help demo demo-lora demo-vision test test-peers gpu check lint wheel clean

help:
	@echo "make demo    train, save and run a small model on the CPU"
	@echo "make demo-lora      adapt the model of make demo, which runs first if it has not, to a new task"
	@echo "make demo-vision    the same of one that reads pictures"
	@echo "make test    all tests that need no GPU"
	@echo "make gpu     the tests that need one"
	@echo "make test-peers  our exports in other people's engines, which it fetches; no part of make test"
	@echo "make test-big    conversion of 8 GB, killed and measured, in BIG (45 GB of disk); no part of make test"
	@echo "make lint    ruff and mypy"
	@echo "make check   lint, then test: what a change must pass"
	@echo "make wheel   build dist/*.whl"
	@echo "make clean   remove what was built; .venv stays"

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --no-input --disable-pip-version-check -c constraints.txt -e '.[triton,train,peft,dev]'
	touch $@

demo: $(VENV)
	$(MOE_LC) demo

runs/demo/report.md: | $(VENV)
	$(MOE_LC) demo

demo-lora: $(VENV) runs/demo/report.md
	$(MOE_LC) demo-lora

demo-vision: $(VENV)
	$(MOE_LC) demo-vision

# One thread for each worker: on small shapes, threads of several workers only stand in each other's way.
test: $(VENV)
	OMP_NUM_THREADS=1 $(PY) -m pytest -m "not gpu" -n $(WORKERS)

# Each engine has an environment of its own: what it depends on is nothing of ours.
PEERS := $(CURDIR)/build/peers
$(PEERS)/mlx_lm/.installed: tests/peers/requirements-mlx-lm.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --no-input --disable-pip-version-check -r $<
	touch $@

# From its source, which has the converter that the wheels lack; the runtime is compiled (a C++ compiler, 6 minutes on 2 cores).
$(PEERS)/llama_cpp/.installed: tests/peers/requirements-llama-cpp.txt constraints.txt
	$(PYTHON) -m venv $(@D)
	rm -rf $(@D)/source && mkdir $(@D)/source
	$(@D)/bin/python -m pip download --no-input --disable-pip-version-check --no-deps --no-binary llama-cpp-python \
	    -d $(@D)/source "$$(grep ^llama-cpp-python $<)"
	tar -xzf $(@D)/source/*.tar.gz -C $(@D)/source --strip-components 1
	CMAKE_ARGS="-DLLAVA_BUILD=OFF -DLLAMA_OPENSSL=OFF" $(@D)/bin/python -m pip install --no-input \
	    --disable-pip-version-check $(@D)/source/*.tar.gz -c constraints.txt -r $<
	touch $@

test-peers: $(VENV) $(PEERS)/mlx_lm/.installed $(PEERS)/llama_cpp/.installed
	OMP_NUM_THREADS=1 MOE_LC_PEERS=$(PEERS) $(PY) -m pytest tests/peers

BIG := $(CURDIR)/build/big
test-big: $(VENV)
	$(PY) tests/conversion/big_conversion.py $(BIG)

gpu: $(VENV)
	$(PY) -m pytest -m gpu

check: lint test

# mypy follows neither __path__ nor an editable install, so it sees the installed layout as a throw-away tree of links; of
# files, since it takes a folder presets/ for a package and then misses presets.py beside it.
TREE := build/typecheck
lint: $(VENV)
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	rm -rf $(TREE)
	for file in $$(find modeling_moe_lc configuration kernels conversion training -name '*.py'); do \
	    link=$(TREE)/modeling_moe_lc/$${file#modeling_moe_lc/}; \
	    mkdir -p $${link%/*} && ln -s "$(CURDIR)/$$file" $$link || exit 1; \
	done
	MYPYPATH=$(TREE) $(PY) -m mypy -p modeling_moe_lc

# A stale build/lib would put deleted files into the wheel.
wheel: $(VENV)
	rm -rf build/lib build/bdist.* dist
	$(PY) -m pip wheel --disable-pip-version-check --no-deps --no-build-isolation -w dist .

clean:
	rm -rf build dist .pytest_cache .ruff_cache .mypy_cache *.egg-info
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +
