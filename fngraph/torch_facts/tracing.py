"""Torch's private names that tracing needs: fakes, proxies, symbolic sizes, Dynamo's switches.

Each was seen in torch 2.11 (CUDA) and in 2.13 (CPU). Loading them takes as long as torch itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from torch._C import DispatchKey as DispatchKey  # ZeroTensor, of which tangents are
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)
from torch._dispatch.python import (
    enable_python_dispatcher as enable_python_dispatcher,  # Python kernels before C++ ones
    no_python_dispatcher as no_python_dispatcher,
)
from torch._dynamo import config
from torch._dynamo.source import ConstantSource as ConstantSource  # where a symbol comes from
from torch._guards import SLoc as SLoc  # for torch's logs: where a question was asked
from torch._subclasses.fake_tensor import (
    DataDependentOutputException as DataDependentOutputException,  # a value was asked of a fake
    FakeTensor as FakeTensor,
    FakeTensorMode as FakeTensorMode,
    UnsupportedOperatorException as UnsupportedOperatorException,  # an op has no rule for fakes
    in_kernel_invocation_manager as in_kernel_invocation_manager,  # a fake is its meta tensor
)
from torch.autograd import forward_ad
from torch.backends import opt_einsum
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.proxy_tensor import (
    get_proxy_mode as get_proxy_mode,  # of the trace that is going on
    get_proxy_slot as get_proxy_slot,  # the node of a tensor
    has_proxy_slot as has_proxy_slot,
    make_fx as make_fx,
    track_tensor_tree as track_tensor_tree,  # says which node made a tensor
)
from torch.fx.experimental.sym_node import SymNode as SymNode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic as DimDynamic,
    ShapeEnv as ShapeEnv,
    free_unbacked_symbols as free_unbacked_symbols,  # sizes that depend on values
)
from torch.utils._sympy.functions import FloorDiv as FloorDiv, Mod as Mod, PythonMod as PythonMod
from torch.utils._sympy.interp import sympy_interp as sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis as PythonReferenceAnalysis

F = TypeVar("F", bound=Callable[..., Any])
ONE_AT_A_TIME = threading.RLock()
"""Held while functions or switches of torch are changed that all threads call: by a trace, and by
bare `forward` (`in_given_order`). Nobody forks meanwhile, or the child's own trace would wait."""
if hasattr(os, "register_at_fork"):
    _release = ONE_AT_A_TIME.release
    os.register_at_fork(
        before=ONE_AT_A_TIME.acquire, after_in_parent=_release, after_in_child=_release
    )
LazyGraphModule = _LazyGraphModule  # its code is written when it is first asked for


class Fakes(FakeTensorMode):
    """Fakes whose sizes are symbols of `env`; no tensor with memory is let in.

    Torch's cache of what ops give is for programs that repeat themselves. A new entry costs as much
    as the op's own rule, since torch makes the result of it again to see that it is right, and one
    that is found saves a fifth. So short programs do without: a trace of a tiny llama takes 0.42 s
    in place of 0.60 s.
    """

    def __init__(self, env: ShapeEnv) -> None:
        super().__init__(shape_env=env, allow_non_fake_inputs=False)
        self.cache_enabled, self.calls = False, 0

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What a fake's op gives."""
        self.calls += 1
        self.cache_enabled = self.calls > _SHORT
        return super().dispatch(func, types, args, kwargs)


_SHORT = 1000  # calls, of which each op is one to three


@contextlib.contextmanager
def preserved_proxies(tracer: Any) -> Iterator[None]:
    """Meanwhile what is traced is tracked as always; afterwards `tracer` knows the tensors and
    sizes that it knew before, by the nodes that they had. `sympy_expr_tracker` is newer than 2.9.
    """
    tensors = dict(tracer.tensor_tracker.items())
    sizes, exprs = dict(tracer.symnode_tracker.sym_node_dict), dict(tracer.sympy_expr_tracker)
    try:
        yield
    finally:
        tracer.tensor_tracker.clear()
        tracer.tensor_tracker.update(tensors)
        tracer.symnode_tracker.sym_node_dict = sizes
        tracer.sympy_expr_tracker = exprs


def tracked(tracer: Any) -> list[Any]:
    """The tensors that a trace has seen made and that are alive."""
    return list(tracer.tensor_tracker.keys())


def node_of_size(size: Any, tracer: Any) -> Any:
    """The node of a number made of T and R; it may be made for it."""
    return get_proxy_slot(size, tracer).force().node  # type: ignore[union-attr,attr-defined]


@contextlib.contextmanager
def unlogged() -> Iterator[None]:
    """Meanwhile torch writes no traceback of its own for an op of this thread that fails on fakes:
    the error is raised, and is the caller's to read once."""

    def keep(record: logging.LogRecord) -> bool:
        return record.thread != here or not str(record.msg).startswith("failed while attempting")

    here, logger = threading.get_ident(), logging.getLogger("torch._subclasses.fake_tensor")
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def in_forward_mode() -> bool:
    """Whether a forward-mode derivative is being taken: `jvp`, `dual_level`."""
    return forward_ad._current_level >= 0


def under_compile() -> AbstractContextManager[Any]:
    """Meanwhile what is under `torch.compile` is traced as the function that it was made from."""
    return config.patch(error_on_nested_fx_trace=False)


def in_given_order() -> AbstractContextManager[Any]:
    """Meanwhile `torch.einsum` multiplies three tensors and more from left to right: opt_einsum,
    where that is installed, chooses an order by sizes, which symbols are not."""
    return opt_einsum.flags(enabled=False)


def run_by_python(fn: F) -> F:
    """Have Dynamo call a function, and what it calls, as Python does: a graph break under
    `torch.compile`, and with fullgraph=True an error of torch's that says this reason.

    As `torch.compiler.disable` has it, without its wrapper, which takes 1 us at each call.
    """
    code: Any = fn.__code__  # type: ignore[attr-defined]
    set_code_exec_strategy(code, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    fn._torchdynamo_disable = True  # type: ignore[attr-defined]
    fn._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
        "a graphified function replays graphs of its own, which torch.compile cannot look into. "
        "Leave fullgraph=True out, or call it outside; fg.graphify(..., compile=...) compiles what "
        "is inside"
    )
    return fn
