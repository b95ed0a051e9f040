"""Other people's models, made into steps. Each module needs its library only when it is called."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fngraph.integrations import transformers as transformers

_MODULES = ("transformers",)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'fngraph.integrations' has no attribute {name!r}")
    return importlib.import_module(f"fngraph.integrations.{name}")


__all__ = ["transformers"]
