"""fngraph: pure functions over static buffers, captured as CUDA graphs and dispatched by values.

`import fngraph` loads nothing heavy (PEP 562): `fngraph.core` and the errors never import torch;
the rest comes in with the first name that needs it.
"""

from __future__ import annotations

import typing as _typing

__version__ = "0.1.0"

# name -> module that holds it, grouped by layer; this is the table of contents
_EXPORTS = {
    # pure decisions, no torch
    "Mode": "core", "Support": "core",
    "BatchSpec": "core", "BatchDescriptor": "core", "Limits": "core", "HostBounds": "core",
    "struct": "core", "buffer": "core", "host": "core", "static": "core",
    "dispatch": "core", "explain": "core", "resolve": "core",
    # the transform and its stages
    "graphify": "graphified",
    "encode": "encoder.run", "encoder_limits": "encoder.run",
    "EncoderModel": "encoder.model", "EncoderPath": "encoder.model", "Measured": "encoder.model",
    "graphify_encoder": "encoder.graphs", "Encoder": "encoder.graphs",
    "EncoderStats": "encoder.statistics",
    "from_module": "fx.modules",
    "trust_rows": "fx.rows.check",
    "check": "checking",
    "while_loop": "fx.loops.functions", "fori_loop": "fx.loops.functions",
    "scan": "fx.loops.functions", "cond": "fx.loops.functions",
    "block": "fx.blocks.stamps", "checkpoint": "fx.blocks.checkpointing", "like": "tracing",
    "Traced": "stages", "Split": "stages", "Lowered": "stages", "Compiled": "stages",
    "Step": "step.step", "ChangedRows": "step.changed_rows",
    # steps that check themselves
    "Verify": "options", "Difference": "shadow.difference",
    "bisect": "shadow.bisecting", "Bisection": "shadow.bisecting",
    # many processes
    "Mesh": "ranks.mesh", "Axis": "ranks.mesh", "make_mesh": "ranks.mesh",
    "Board": "ranks.board", "make_board": "ranks.board",
    "all_reduce": "ranks.collectives", "all_gather": "ranks.collectives",
    "reduce_scatter": "ranks.collectives", "all_to_all": "ranks.collectives",
}  # fmt: skip
_MODULES = ("core", "errors", "ops", "passes", "models", "report", "testing", "integrations")

if _typing.TYPE_CHECKING:  # the same for type checkers and editors; a test holds the two together
    from fngraph import (
        core as core,
        errors as errors,
        integrations as integrations,
        models as models,
        ops as ops,
        passes as passes,
        report as report,
        testing as testing,
    )
    from fngraph.checking import check as check
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
    from fngraph.encoder.graphs import Encoder as Encoder, graphify_encoder as graphify_encoder
    from fngraph.encoder.model import (
        EncoderModel as EncoderModel,
        EncoderPath as EncoderPath,
        Measured as Measured,
    )
    from fngraph.encoder.run import encode as encode, encoder_limits as encoder_limits
    from fngraph.encoder.statistics import EncoderStats as EncoderStats
    from fngraph.fx.blocks.checkpointing import checkpoint as checkpoint
    from fngraph.fx.blocks.stamps import block as block
    from fngraph.fx.loops.functions import (
        cond as cond,
        fori_loop as fori_loop,
        scan as scan,
        while_loop as while_loop,
    )
    from fngraph.fx.modules import from_module as from_module
    from fngraph.fx.rows.check import trust_rows as trust_rows
    from fngraph.graphified import graphify as graphify
    from fngraph.options import Verify as Verify
    from fngraph.ranks.board import Board as Board, make_board as make_board
    from fngraph.ranks.collectives import (
        all_gather as all_gather,
        all_reduce as all_reduce,
        all_to_all as all_to_all,
        reduce_scatter as reduce_scatter,
    )
    from fngraph.ranks.mesh import Axis as Axis, Mesh as Mesh, make_mesh as make_mesh
    from fngraph.shadow.bisecting import Bisection as Bisection, bisect as bisect
    from fngraph.shadow.difference import Difference as Difference
    from fngraph.stages import (
        Compiled as Compiled,
        Lowered as Lowered,
        Split as Split,
        Traced as Traced,
    )
    from fngraph.step.changed_rows import ChangedRows as ChangedRows
    from fngraph.step.step import Step as Step
    from fngraph.tracing import like as like
else:  # hidden from type checkers, which would take any name for one of ours

    def __getattr__(name):
        if name in _MODULES:
            return _loaded(name)
        if name not in _EXPORTS:
            raise AttributeError(f"module 'fngraph' has no attribute {name!r}{_meant(name)}")
        value = getattr(_loaded(_EXPORTS[name]), name)
        globals()[name] = value
        return value

    def _loaded(module):
        import importlib

        from fngraph.core.collector import without_collector

        with without_collector():
            return importlib.import_module(f"fngraph.{module}")

    def _meant(name):
        if name.startswith("_"):  # what Python itself looks for
            return ""
        from fngraph.core.text import did_you_mean

        near = did_you_mean(name, __all__)
        return f".{near}" if near else ""

    def __dir__():
        return sorted(__all__)


__all__ = sorted([*_EXPORTS, *_MODULES])
