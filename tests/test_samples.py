"""Which cases of a test `make test` runs, and which are left out where time is over."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CONFTEST = """
from tests.conftest import (
    pytest_collection_modifyitems, pytest_runtest_setup, pytest_terminal_summary
)
"""
INI = """[pytest]
addopts = -q --strict-markers -p no:cacheprovider
markers =
    gpu: .
    sampled(n): .
    rest: .
"""
TESTS = """
import pytest

@pytest.mark.sampled(2)
@pytest.mark.parametrize("i", range(5))
def test_some(i): pass

@pytest.mark.sampled("4")
@pytest.mark.parametrize("i", range(5))
def test_named(i): pass

@pytest.mark.sampled(0)
def test_long(): pass

def test_short(): pass
"""


def ran(folder: Path, *arguments: str, minutes: str = "", tests: str = TESTS) -> tuple[int, str]:
    """Exit code and what pytest says of these tests."""
    for name, text in {"conftest.py": CONFTEST, "pytest.ini": INI, "test_it.py": tests}.items():
        (folder / name).write_text(text)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "REST_"))}
    env |= {"PYTHONPATH": str(ROOT)} | ({"REST_MINUTES": minutes} if minutes else {})
    command = [sys.executable, "-m", "pytest", *arguments]
    one = subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=60
    )
    return one.returncode, one.stdout + one.stderr


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("arguments", "passed"),
    [
        (("-m", "not gpu and not rest"), 2 + 1 + 0 + 1),
        (("-m", "not gpu"), 5 + 5 + 1 + 1),
        (("-m", "rest"), 3 + 4 + 1),
        (("-m", "not gpu and not rest", "test_it.py::test_long"), 1),
    ],
)
def test_a_sample_and_its_rest(arguments, passed, tmp_path):
    code, said = ran(tmp_path, *arguments)
    assert (code, f"{passed} passed" in said) == (0, True), said


@pytest.mark.sampled(1)
@pytest.mark.parametrize("workers", [(), ("--numprocesses", "2")])
def test_what_there_is_no_time_for_is_told(workers, tmp_path):
    code, said = ran(tmp_path, "-m", "not gpu", *workers, minutes="0")
    assert code == 0 and "4 passed, 8 skipped" in said, said
    assert "8 cases NOT run: no time was left for the rest after 0 minutes" in said
    code, said = ran(tmp_path, "-m", "not gpu", *workers, minutes="50")
    assert code == 0 and "12 passed" in said and "NOT run" not in said, said


@pytest.mark.sampled(0)
def test_a_sample_of_none_is_an_error(tmp_path):
    code, said = ran(tmp_path, tests=TESTS.replace('sampled("4")', 'sampled("7")'))
    assert code == 4 and "test_named: sampled('7',) names none of its cases" in said, said
