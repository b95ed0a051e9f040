"""The nodes of a `cudaGraph_t`, through `cuda.bindings`: kinds, kernel names, edges.

The driver's interface, not the runtime's, which knows no function for the kernels that Triton
launches. A child graph is a node of its own, followed by the nodes inside of it. So is a
conditional node: its body counts once, however often it runs.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from typing import Any

from fngraph.graphs.inside import Node
from fngraph.torch_facts.driver import checked, driver_for, newest

Edges = tuple[tuple[int, int], ...]


def read(graph: int, bodies: Mapping[int, int] | None = None) -> tuple[tuple[Node, ...], Edges]:
    """Nodes of the graph at this address, and (from, to) by index.

    Args:
        bodies: the graph inside each conditional node, by the addresses of both; CUDA 13.0 tells it
            nobody but who made the node.
    """
    nodes: list[Node] = []
    edges: list[tuple[int, int]] = []
    _read(driver_for("looking inside a CUDA graph"), graph, nodes, edges, bodies or {})
    return tuple(nodes), tuple(sorted(edges))


def _read(
    driver: Any,
    graph: Any,
    nodes: list[Node],
    edges: list[tuple[int, int]],
    bodies: Mapping[int, int],
) -> None:
    graph = driver.CUgraph(init_value=int(graph))
    types = driver.CUgraphNodeType
    _, number = _checked(driver, driver.cuGraphGetNodes(graph))
    found, _ = _checked(driver, driver.cuGraphGetNodes(graph, number)) if number else ((), 0)
    at = {}
    for node in found:
        kind = _checked(driver, driver.cuGraphNodeGetType(node))[0]
        at[int(node)] = len(nodes)
        if kind == types.CU_GRAPH_NODE_TYPE_KERNEL:
            nodes.append(Node("kernel", _kernel_name(driver, node)))
        elif kind == types.CU_GRAPH_NODE_TYPE_MEMCPY:
            nodes.append(Node("memcpy", "memcpy"))
        elif kind == types.CU_GRAPH_NODE_TYPE_MEMSET:
            nodes.append(Node("memset", "memset"))
        else:
            word = types(kind).name.removeprefix("CU_GRAPH_NODE_TYPE_").lower()
            nodes.append(Node("other", word))
        if kind == types.CU_GRAPH_NODE_TYPE_GRAPH:
            (child,) = _checked(driver, driver.cuGraphChildGraphNodeGetGraph(node))
            _read(driver, child, nodes, edges, bodies)
        elif int(node) in bodies and kind == types.CU_GRAPH_NODE_TYPE_CONDITIONAL:
            _read(driver, bodies[int(node)], nodes, edges, bodies)
    # the first cannot tell of programmatic launches before CUDA 13, where the second is gone
    get_edges = newest(driver, "cuGraphGetEdges", "v2")
    number = _checked(driver, get_edges(graph))[-1]
    if number:
        sources, targets, *_ = _checked(driver, get_edges(graph, number))
        edges += [(at[int(a)], at[int(b)]) for a, b in zip(sources, targets)]


def _kernel_name(driver: Any, node: Any) -> str:
    (params,) = _checked(driver, driver.cuGraphKernelNodeGetParams(node))
    try:
        if int(params.func):
            (name,) = _checked(driver, driver.cuFuncGetName(params.func))
        else:
            (name,) = _checked(driver, driver.cuKernelGetName(params.kern))
    except RuntimeError:  # a driver before 12.3 cannot tell
        return "kernel"
    return readable(name.decode() if isinstance(name, bytes) else name)


def _checked(driver: Any, result: tuple[Any, ...]) -> tuple[Any, ...]:
    return checked(driver, result, "cannot read the graph")


@functools.cache
def readable(name: str) -> str:
    """A kernel's mangled name as in C++ source, without namespaces of torch and arguments."""
    text = _demangled(name)
    for noise in ("(anonymous namespace)::", "at::native::"):
        text = text.replace(noise, "")
    if text.endswith(")"):
        depth = 0
        for i in range(len(text) - 1, -1, -1):
            depth += (text[i] == ")") - (text[i] == "(")
            if depth == 0:
                text = text[:i]
                break
    return text.removeprefix("void ")


def _demangled(name: str) -> str:
    if not name.startswith("_Z"):
        return name
    try:
        demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    except (OSError, AttributeError):  # no such library: the name as it is
        return name
    demangle.restype = ctypes.c_void_p
    status = ctypes.c_int()
    address = demangle(name.encode(), None, None, ctypes.byref(status))
    if not address:
        return name
    text = ctypes.string_at(address).decode()
    free = ctypes.CDLL(None).free
    free.argtypes = [ctypes.c_void_p]
    free(address)
    return text
