"""`fngraph::compiled`: the one op that calls compiled code, whatever the piece.

To a recorder, a witness and every dispatch mode a compiled piece is one call of it, whose schema
says what is read, what is written, and that the results are new memory. What it calls is found by a
handle, held weakly: code lives as long as the executable and the replays that run it.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Protocol

import torch

from fngraph.errors import CompileError

Tensors = list[torch.Tensor]


class Code(Protocol):
    """What the op calls."""

    def run(self, num_tokens: int, num_reqs: int, reads: Tensors, writes: Tensors) -> Tensors:
        """Call it: new tensors; `writes` are written."""
        ...

    def shapes(self, num_tokens: int, num_reqs: int) -> Tensors:
        """Its results, without memory."""
        ...


_CODES: weakref.WeakValueDictionary[int, Code] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


def register(code: Code) -> int:
    """A handle, good as long as `code` lives."""
    handle = next(_NUMBERS)
    _CODES[handle] = code
    return handle


def _code(handle: int) -> Any:
    code = _CODES.get(handle)
    if code is None:
        raise CompileError(
            "a recording runs compiled code that is gone: its step was released. Keep the step, or "
            "its Replay, as long as you replay a recording of it"
        )
    return code


def _run(handle: int, num_tokens: int, num_reqs: int, reads: Tensors, writes: Tensors) -> Tensors:
    made: Tensors = _code(handle).run(num_tokens, num_reqs, reads, writes)
    return made


def _shapes(
    handle: int, num_tokens: int, num_reqs: int, reads: Tensors, writes: Tensors
) -> Tensors:
    made: Tensors = _code(handle).shapes(num_tokens, num_reqs)
    return made


_LIBRARY = torch.library.Library("fngraph", "FRAGMENT")
_LIBRARY.define(
    "compiled(int handle, SymInt num_tokens, SymInt num_reqs, Tensor[] reads, Tensor(a!)[] writes)"
    " -> Tensor[]"
)
_LIBRARY.impl("compiled", _run, "CompositeExplicitAutograd")
_LIBRARY.impl("compiled", _shapes, "Meta")
COMPILED = torch.ops.fngraph.compiled.default
"""`(handle, T, R, tensors that are read, tensors that are written too) -> new tensors`."""
