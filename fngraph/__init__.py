"""fngraph: pure functions over static buffers, captured as CUDA graphs and dispatched by values.

`import fngraph` loads nothing heavy (PEP 562): `fngraph.core` and the errors never import torch;
the rest comes in with the first name that needs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# name -> module that holds it, grouped by layer; this is the table of contents
_EXPORTS = {
    # pure decisions, no torch
    "Mode": "core", "Support": "core",
    "BatchSpec": "core", "BatchDescriptor": "core", "Limits": "core", "HostBounds": "core",
    "struct": "core", "buffer": "core", "host": "core", "static": "core",
    "dispatch": "core", "explain": "core", "resolve": "core",
    # the transform and its stages
    "graphify": "graphify",
    "encode": "encoder", "encoder_limits": "encoder",
    "from_module": "fx.modules",
    "trust_rows": "fx.rows.check",
    "check": "check",
    "block": "fx.blocks.stamps", "like": "stages",
    "Traced": "stages", "Split": "stages", "Lowered": "stages", "Compiled": "stages",
    "Captured": "step.captured", "ChangedRows": "step.changed_rows",
}  # fmt: skip
_MODULES = ("core", "errors", "ops", "fx", "graphs", "models", "report", "testing", "integrations")

if TYPE_CHECKING:
    from fngraph import core as core, errors as errors, ops as ops
    from fngraph.core import (
        BatchDescriptor as BatchDescriptor,
        BatchSpec as BatchSpec,
        HostBounds as HostBounds,
        Limits as Limits,
        Mode as Mode,
        Support as Support,
        buffer as buffer,
        dispatch as dispatch,
        explain as explain,
        host as host,
        resolve as resolve,
        static as static,
        struct as struct,
    )


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"fngraph.{name}")
    if name not in _EXPORTS:
        raise AttributeError(f"module 'fngraph' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"fngraph.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS, *_MODULES})


__all__ = sorted([*_EXPORTS, *_MODULES])
