"""Tiny models of all families, for every test of passes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

Folder = Callable[[str], Path]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Where a tiny model of a family is, saved once."""
    from tests.models import tiny

    @functools.cache
    @torch.no_grad()
    def saved(name: str) -> Path:
        path = tmp_path_factory.mktemp(name)
        tiny.save(name, path)
        return path

    return saved
