"""`fngraph.core` stands alone: no torch, the names it lists, and examples that hold."""

import dataclasses
import doctest
import importlib
import inspect
import os
import pkgutil
import subprocess
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, NoneType, UnionType

import pytest

import fngraph.core

PREFIX = "fngraph.core."
MODULES = [
    module.name.removeprefix(PREFIX)
    for module in pkgutil.walk_packages(fngraph.core.__path__, PREFIX)
]


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


def annotated(holder, module):
    """Functions and classes of a module, methods among them."""
    for held in vars(holder).values():
        held = inspect.unwrap(getattr(held, "fget", held))
        if callable(held) and getattr(held, "__module__", None) == module:
            yield held
            yield from annotated(held, module) if isinstance(held, type) else ()


def is_empty(hint):
    """Whether a type, or a part of it, is None and nothing else."""
    kind, parts = typing.get_origin(hint), typing.get_args(hint)
    if kind in (typing.Union, UnionType):
        parts = [part for part in parts if part is not NoneType]
    return hint in (None, NoneType) or any(map(is_empty, parts[:-1] if kind is Callable else parts))


@pytest.mark.parametrize("module", MODULES)
def test_annotations_are_types(module):
    held = importlib.import_module(f"fngraph.core.{module}")
    for one in annotated(held, held.__name__):
        hints = typing.get_type_hints(one)
        if hints.get("return") is NoneType:
            del hints["return"]
        assert not any(map(is_empty, hints.values())), one
