"""Torch's private names that tracing needs: fakes, proxies, symbolic sizes, Dynamo's switches.

Each was seen in torch 2.11 (CUDA) and in 2.13 (CPU). Loading them takes as long as torch itself.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch._C import DispatchKey as DispatchKey  # ZeroTensor, of which tangents are
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
from torch.utils._sympy.functions import Mod as Mod, PythonMod as PythonMod
from torch.utils._sympy.interp import sympy_interp as sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis as PythonReferenceAnalysis

LazyGraphModule = _LazyGraphModule  # its code is written when it is first asked for


def in_forward_mode() -> bool:
    """Whether a forward-mode derivative is being taken: `jvp`, `dual_level`."""
    return forward_ad._current_level >= 0


def under_compile() -> AbstractContextManager[Any]:
    """Meanwhile what is under `torch.compile` is traced as the function that it was made from."""
    return config.patch(error_on_nested_fx_trace=False)
