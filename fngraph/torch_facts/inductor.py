"""Inductor handed a graph with symbolic sizes, ahead of time; and what it has made of it.

Seen in torch 2.13 (CPU); 2.11's `standalone_compile` takes the same arguments. Loading Inductor
takes seconds, so that it is loaded by the first call. `portable.py` has what is made as bytes.
"""

from __future__ import annotations

import contextlib
import functools
import re
import time
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._guards import TracingContext, tracing

from fngraph.torch_facts.names import DisableTorchFunction
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
        at = functools.partial(sympy_interp, PythonReferenceAnalysis, known)  # `subs`: 10 times it
        equal = all(at(a) == at(b) for a, b in self.equal)
        return equal and all(at(x) == True for x in self.conditions)  # noqa: E712


def size_at(size: Any, values: Mapping[Any, Any]) -> Any:
    """A size, an int or of a fake, at values of its symbols: ints, or other symbols."""
    if isinstance(size, int):
        return size
    return sympy_interp(PythonReferenceAnalysis, dict(values), size.node.expr)


@torch.inference_mode(False)
def _outside(x: torch.Tensor) -> torch.Tensor:
    """The same memory, and no inference tensor."""
    made = torch.empty(0, dtype=x.dtype, device=x.device)
    return made.set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())


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


def compile_ahead(
    gm: fx.GraphModule, inputs: Sequence[Any], fakes: FakeTensorMode, tag: str
) -> Made:
    """Compile `gm` for inputs without memory; sizes among them are arguments, too.

    Args:
        inputs: ints, symbols, and fakes of `fakes`.
        tag: part of the key by which torch's own caches find what they have.
    """
    import torch.compiler.config
    from torch._inductor import standalone_compile

    compiler: Any = torch.compiler.config
    with tracing(TracingContext(fakes)), compiler.patch(cache_key_tag=tag), _silent():
        # "aot": in one piece, which can be saved
        return made_of(
            standalone_compile(gm, list(inputs), dynamic_shapes="from_tracing_context", aot=True)
        )


def settle_environment() -> None:
    """Set what Inductor sets in the environment when it first compiles a kernel in this process.

    Triton's assembler is torch's own where torch brings one (the builds of 2.11 for CUDA 13). A
    process that has found all of its code on disk, or had it compiled by workers, has not set it.
    """
    from torch._inductor.runtime import compile_tasks

    compile_tasks._set_triton_ptxas_path()
    if hasattr(compile_tasks, "_set_triton_libdevice_path"):  # not in 2.11; off by default
        compile_tasks._set_triton_libdevice_path()


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Without advice on how precise products are to be: that is ambient state, as it was traced.
    And without word of how it goes about a reduction, which ends compilation where warnings are
    errors."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
        warnings.filterwarnings("ignore", message=r"\s*Online softmax is disabled")
        yield


def made_of(call: Any) -> Made:
    """A function that Inductor has made, with what is to be seen of it."""
    code = code_of(call)
    if code is None:
        return Made(call, "not found", 0)
    return Made(call, code.write_to_disk(), len(_KERNEL.findall(code.source_code)))


def under_torch_compile(
    gm: fx.GraphModule, tell: Callable[[Made, int], None]
) -> Callable[..., Any]:
    """`gm` under `torch.compile`, which compiles when it first runs; each time it does, `tell` is
    told what was made, and how long that took in microseconds.

    No graph break and no fall back to eager; equal sizes are not taken for one.
    """
    from torch._inductor.compile_fx import compile_fx
    from torch.fx.experimental import _config

    sizes: Any = _config

    def backend(graph: Any, inputs: Any) -> Any:
        began = time.perf_counter_ns()
        with _silent():
            made = compile_fx(graph, inputs)
        tell(made_of(made), (time.perf_counter_ns() - began) // 1000)
        return made

    fn = torch.compile(gm, backend=backend, dynamic=True, fullgraph=True)

    def call(*args: Any) -> Any:
        # in one state of torch, whatever the caller's: its guards ask for it
        with sizes.patch(use_duck_shape=False), DisableTorchFunction(), torch.inference_mode():
            results = fn(*[x.detach() if isinstance(x, torch.Tensor) else x for x in args])
        return [_outside(x) for x in results]

    return call


_KERNEL = re.compile(r"^\w+ = async_compile\.\w+\(", re.MULTILINE)


_EMPTY = types.CellType()  # of a name that is not yet bound


def code_of(call: Any) -> Any:
    """The compiled graph that torch's own wrappers are around, or that torch has saved."""
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
        if isinstance(one, tuple | list):
            left += one
        elif isinstance(one, functools.partial):
            left += [one.func, *one.args]
        elif isinstance(one, types.FunctionType):
            left += [cell.cell_contents for cell in one.__closure__ or () if cell != _EMPTY]
        elif isinstance(one, types.MethodType):
            left += [one.__self__, one.__func__]
        else:
            left += getattr(one, "__dict__", {}).values()
    return None
