"""The package's C extension, in tests: whether the build could have made it here."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import pytest

from fngraph.graphs import addresses


def can_compile() -> bool:
    """Whether there are a compiler and Python's headers."""
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    return bool(shutil.which(compiler)) and Path(sysconfig.get_path("include"), "Python.h").exists()


def needs_it() -> None:
    """Skip a test where it could not be made; where it could, it has to be there."""
    if addresses._words is None:
        assert not can_compile(), "fngraph/graphs/words.c is not built: pip install -e ."
        pytest.skip("there is no C compiler with Python's headers")
