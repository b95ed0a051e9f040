"""Inductor handed a graph with symbolic sizes, ahead of time; and what it has made of it.

Seen in torch 2.13 (CPU); 2.11's `standalone_compile` takes the same arguments. Loading Inductor
takes seconds, so that it is loaded by the first call.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._guards import TracingContext, tracing

from fngraph.torch_facts.tracing import (
    ConstantSource,
    DimDynamic,
    FakeTensorMode,
    PythonReferenceAnalysis,
    ShapeEnv,
    sympy_interp,
)


class Sizes:
    """Numbers that stay symbols while code is compiled, and what was then assumed of them.

    Args:
        examples: name to an example, above one.
    """

    def __init__(self, examples: Mapping[str, int]) -> None:
        self.env = ShapeEnv(specialize_zero_one=False, duck_shape=False)
        self.fakes = FakeTensorMode(shape_env=self.env)
        self.symbols: dict[str, Any] = {}
        for name, example in examples.items():
            source = ConstantSource(name)
            symbol = self.env.create_symbol(
                example, source, DimDynamic.DYNAMIC, constraint_dim=None
            )
            node = self.env.create_symintnode(symbol, hint=example, source=source)
            self.symbols[name] = node

    def assumed(self) -> Assumed:
        """What torch has assumed so far, without this environment, which is large."""
        guards = dict.fromkeys(guard.expr for guard in self.env.guards)
        symbols = {name: size.node.expr for name, size in self.symbols.items()}
        return Assumed(symbols, tuple(guards), tuple(self.env.replacements.items()))


class Assumed(NamedTuple):
    """Conditions, in sympy, under which compiled code is right.

    Attributes:
        symbols: name to symbol.
        equal: a symbol, and what torch has put in its place.
    """

    symbols: Mapping[str, Any]
    conditions: tuple[Any, ...]
    equal: tuple[tuple[Any, Any], ...]

    def holds(self, values: Mapping[str, int]) -> bool:
        """Whether all is true of these numbers."""
        known = {symbol: values[name] for name, symbol in self.symbols.items()}
        equal = all(a.subs(known) == b.subs(known) for a, b in self.equal)
        return equal and all(x.subs(known) == True for x in self.conditions)  # noqa: E712


def size_at(size: Any, values: Mapping[Any, Any]) -> Any:
    """A size, an int or of a fake, at values of its symbols: ints, or other symbols."""
    if isinstance(size, int):
        return size
    return sympy_interp(PythonReferenceAnalysis, dict(values), size.node.expr)


class Made(NamedTuple):
    """What Inductor has made.

    Attributes:
        call: the function, of the same arguments; it returns a sequence.
        path: where its generated code is.
        kernels: how many kernels of Inductor's own it defines.
    """

    call: Callable[..., Any]
    path: str
    kernels: int


def compile_ahead(gm: fx.GraphModule, inputs: Sequence[Any], fakes: FakeTensorMode) -> Made:
    """Compile `gm` for inputs without memory; sizes among them are arguments, too.

    Args:
        inputs: ints, symbols, and fakes of `fakes`.
    """
    from torch._inductor import standalone_compile

    with tracing(TracingContext(fakes)):
        call = standalone_compile(gm, list(inputs), dynamic_shapes="from_tracing_context")
    code = _code_of(call)
    if code is None:
        return Made(call, "not found", 0)
    return Made(call, code.write_to_disk(), len(_KERNEL.findall(code.source_code)))


_KERNEL = re.compile(r"^\w+ = async_compile\.\w+\(", re.MULTILINE)


def _code_of(call: Any) -> Any:
    """The compiled graph that torch's own wrappers are around."""
    from torch._inductor.output_code import CompiledFxGraph

    seen: dict[int, Any] = {}  # by id; they are kept, so that an id stays one object's
    left = [call]
    while left and len(seen) < 1000:
        one = left.pop()
        if isinstance(one, CompiledFxGraph):
            return one
        if id(one) in seen or isinstance(one, (type, types.ModuleType, torch.Tensor)):
            continue
        seen[id(one)] = one
        if isinstance(one, functools.partial):
            left += [one.func, *one.args]
        elif isinstance(one, types.FunctionType):
            left += [cell.cell_contents for cell in one.__closure__ or ()]
        elif isinstance(one, types.MethodType):
            left += [one.__self__, one.__func__]
        else:
            left += getattr(one, "__dict__", {}).values()
    return None
