"""`fngraph.core` stands alone: no torch, the names it lists, and examples that hold."""

import dataclasses
import doctest
import importlib
import os
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import fngraph.core

MODULES = [module.name for module in pkgutil.iter_modules(fngraph.core.__path__)]


def run(code: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **env}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_core_brings_neither_torch_nor_numpy():
    heavy = "sorted({'torch', 'numpy', 'optree', 'rich', 'matplotlib'} & set(sys.modules))"
    assert run(f"import sys, fngraph.core; print({heavy})") == "[]"


def test_the_test_above_would_notice(tmp_path):
    (tmp_path / "torch.py").write_text("")
    planted = "import sys, fngraph.core, torch; print('torch' in sys.modules)"
    assert run(planted, PYTHONPATH=f"{tmp_path}:{Path.cwd()}") == "True"


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings(module):
    found = doctest.testmod(importlib.import_module(f"fngraph.core.{module}"))
    assert not found.failed


def dataclasses_of_core():
    modules = [importlib.import_module(f"fngraph.core.{module}") for module in MODULES]
    found = (cls for m in modules for cls in vars(m).values() if isinstance(cls, type))
    return {cls for cls in found if dataclasses.is_dataclass(cls)}


def test_values_are_frozen_and_hold_nothing_else():
    """What describes a batch or a program does not change, and is small."""
    assert len(dataclasses_of_core()) > 8
    for cls in dataclasses_of_core():
        value = object.__new__(cls)
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, dataclasses.fields(cls)[0].name, 1)
        assert not hasattr(value, "__dict__"), cls


def test_all_lists_exactly_what_is_imported():
    values = vars(fngraph.core).items()
    names = {n for n, x in values if not n.startswith("_") and not isinstance(x, ModuleType)}
    assert names == set(fngraph.core.__all__)
    assert list(fngraph.core.__all__) == sorted(fngraph.core.__all__)
