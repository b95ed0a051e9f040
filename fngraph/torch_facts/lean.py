"""Compiled code that loads without Inductor's compiler.

What Inductor generates imports the modules that generated it: its lowerings, its templates, a
second for a process that compiles nothing, mostly for the sake of `extern_kernels.mm`, which is
`torch.mm`. So what is kept on disk has another header: what it does not use is not imported, and a
kernel that is a function of torch's is called by that name, as this very torch has it. What cannot
be told is left as it was.

Seen in torch 2.13 (CPU).
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib
import pickle
import sys
import threading
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fngraph.torch_facts.inductor import code_of

_KERNELS = "extern_kernels"
_COMPILERS = ("torch._inductor.select_algorithm", "torch._inductor.codegen")
# ops that Python registers as modules of Inductor's are imported; the one of each header is C++'s
_OPS_OF_PYTHON = ("inductor", "prims", "rngprims", "quantized_decomposed")
_OPS_OF_HEADERS = ("inductor_ops", "alloc_from_pool", "_quantized")


def lightened(data: bytes) -> bytes:
    """An artefact as torch has saved it, with less to load; the same where nothing can be spared.

    The code has another name as well, or torch would take the file of the first one.
    """
    bundle = pickle.loads(data)
    code = code_of(bundle)
    source = None if code is None else _with_less(code.source_code, _kernels())
    if source is None:
        return data
    code.source_code = source
    code.cache_key = "c" + hashlib.sha256(source.encode()).hexdigest()[:50]
    # what to take ops apart by, of which nothing is asked once there is code
    getattr(code, "fx_kwargs", {}).pop("get_decomp_fn", None)
    return pickle.dumps(bundle)


def _kernels() -> Mapping[str, Any]:
    """What Inductor calls by name, in this process, which has compiled."""
    from torch._inductor.select_algorithm import extern_kernels

    return vars(extern_kernels)


def _with_less(source: str, kernels: Mapping[str, Any]) -> str | None:
    """Generated code that imports no module of the compiler; None where it needs one.

    Args:
        kernels: what `extern_kernels` has, by name.
    """
    tree = ast.parse(source)
    if _runs_ops_of_python(tree):
        return None
    used = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
    called = [name for node in ast.walk(tree) if (name := _kernel(node))]
    lines = source.split("\n")
    for node in tree.body:
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(_COMPILERS):
            continue
        text = ""
        for bound in [alias.asname or alias.name for alias in node.names]:
            if bound not in used:
                continue
            named = len(called) == used.count(_KERNELS)
            plain = all(kernels.get(k, _KERNELS) is getattr(torch, k, None) for k in called)
            if bound != _KERNELS or not named or not plain:
                return None
            given = ", ".join(f"{name}=torch.{name}" for name in sorted(set(called)))
            text = f"import types; {_KERNELS} = types.SimpleNamespace({given})"
        assert node.end_lineno is not None
        lines[node.lineno - 1 : node.end_lineno] = [text] + [""] * (node.end_lineno - node.lineno)
    made = "\n".join(lines)
    return None if made == source else made


def _kernel(node: ast.AST) -> str | None:
    """Which one `extern_kernels.something` is; None: it is something else."""
    if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
        return None
    return node.attr if node.value.id == _KERNELS else None


def _runs_ops_of_python(tree: ast.Module) -> bool:
    """Whether an op may be called that is there only once the compiler has been imported."""
    named = [node for node in tree.body if isinstance(node, ast.Assign)]
    header = {id(part) for node in named for part in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in header:
            continue
        if isinstance(node, ast.Name) and node.id in _OPS_OF_HEADERS:
            return True
        if isinstance(node, ast.Attribute) and node.attr in _OPS_OF_PYTHON:
            return True
    return False


# --- loading it -----------------------------------------------------------------------------------

_LOWERING = "torch._inductor.graph"
_DEBUG = "torch._inductor.debug"


class _NotLoaded(types.ModuleType):
    """Stands for Inductor's own lowering of graphs while code is loaded: torch asks it whether a
    test of torch's wants to see the code. Any other question, and any other thread, loads it."""

    class GraphLowering:
        save_output_code = None

    def __init__(self) -> None:
        super().__init__(_LOWERING)
        self.thread = threading.get_ident()

    def __getattribute__(self, name: str) -> Any:
        own = super().__getattribute__
        if name.startswith("__") or (
            name == "GraphLowering" and threading.get_ident() == own("thread")
        ):
            return own(name)
        if sys.modules.get(_LOWERING) is self:
            del sys.modules[_LOWERING]
        return getattr(importlib.import_module(_LOWERING), name)


@contextlib.contextmanager
def without_compiler() -> Iterator[None]:
    """Meanwhile torch loads compiled code without what compiles it, unless that is loaded."""
    if _LOWERING in sys.modules:
        yield
        return
    stands = sys.modules[_LOWERING] = _NotLoaded()
    try:
        yield
    finally:
        if sys.modules.get(_LOWERING) is stands:
            del sys.modules[_LOWERING]


@contextlib.contextmanager
def without_workers() -> Iterator[None]:
    """Meanwhile this thread has what is missing of Triton's kernels compiled where it is.

    Else torch starts a pool of processes, each of which imports torch, once it comes to the first
    kernel; whether that is there, as it is in all that is kept, it looks later.
    """
    from torch._inductor.async_compile import AsyncCompile

    kind: Any = AsyncCompile
    was, here = vars(kind)["use_process_pool"], threading.get_ident()

    def use_process_pool(cls: Any) -> Any:
        return threading.get_ident() != here and was.__get__(None, cls)()

    kind.use_process_pool = classmethod(use_process_pool)
    try:
        yield
    finally:
        kind.use_process_pool = was


class _NothingRecorded(types.ModuleType):
    """Stands for what Inductor debugs with, as an attribute of its package: each call of its code
    asks there whether calls are recorded, which they are only once that module is loaded. Any other
    question loads it, and whoever imports it puts it in this one's place."""

    RECORD_GRAPH_EXECUTION = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(importlib.import_module(_DEBUG), name)


def without_debugger() -> None:
    """From now on compiled code runs without what debugs it (scheduler, `aot_autograd`, networkx: a
    third of what a warm start would load), unless that is loaded."""
    package = importlib.import_module("torch._inductor")
    if not hasattr(package, "debug"):
        package.debug = _NothingRecorded(_DEBUG)  # type: ignore[attr-defined]
