"""fx's generated code: run without its ops' Python wrappers, and blamed by the user's line.

fx writes `torch.ops.aten.mm.default(a, b)`: five lookups and a Python call before torch's own, up
to 1 us an op. Over 900 ops of a small Llama on a CPU, NONE took 1.02 to 1.05 times as long as bare
`forward` with them, and takes 0.8 to 0.9 times as long without.
"""

from __future__ import annotations

import linecache
import re
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fngraph.fx.nodes import is_loop, line_of, name_of
from fngraph.torch_facts.names import OpOverload

_INSTEAD = {torch.ops.aten.view.default: torch.ops.aten.reshape.default}
"""A view is made by the strides that torch's rule gives the op before it, and of some (such as
`channel_shuffle` of what is expanded) the rule gives others than the op does. Then it is a copy:
nothing is written through a view but of memory whose strides are known."""
OP = re.compile(r"\btorch\.ops\.(\w+)\.(\w+)\.(\w+)(?=\()")


def direct(gm: fx.GraphModule) -> Callable[..., Any]:
    """`gm.forward`, its ops bound; files and lines in tracebacks stay those of `gm`."""
    forward: Any = type(gm).forward
    scope = dict(forward.__globals__)
    names: dict[Any, str] = {}
    stem = "bound_"
    while stem in gm.code:  # a node may be called anything
        stem = f"_{stem}"

    def bind(found: re.Match[str]) -> str:
        op: Any = getattr(getattr(getattr(torch.ops, found[1]), found[2]), found[3])
        if type(op) is not OpOverload:
            return found[0]
        op = _INSTEAD.get(op, op)
        if op not in names:
            names[op] = f"{stem}{len(names)}"
            scope[names[op]] = op._op  # what calling an OpOverload does is to call this
        return names[op]

    source = OP.sub(bind, gm.code)
    exec(compile(source, forward.__code__.co_filename, "exec"), scope)  # fx's own text
    return types.MethodType(scope["forward"], gm)


def blame(gm: fx.GraphModule, error: BaseException) -> str | None:
    """`aten.mm.default, from model.py:12`, or None if `error` did not pass through `gm`'s code.

    fx compiles a graph to a file `<eval_with_key>.N` with one statement a node, `name = op(...)`.
    """
    by_file = _by_file(gm)
    found = None
    traceback = error.__traceback__
    while traceback is not None:
        names = by_file.get(traceback.tb_frame.f_code.co_filename)
        if names is not None:
            file = traceback.tb_frame.f_code.co_filename
            statement = linecache.getline(file, traceback.tb_lineno)
            found = names.get(statement.partition("=")[0].strip().partition(":")[0], found)
        traceback = traceback.tb_next
    if found is None:
        return None
    return f"{name_of(found)}, from {line_of(found)}"


def _by_file(gm: fx.GraphModule) -> dict[str, dict[str, fx.Node]]:
    """A graph's nodes by name, by the file that fx has written; and those of its loops' graphs."""
    forward: Any = type(gm).forward
    found = {forward.__code__.co_filename: {node.name: node for node in gm.graph.nodes}}
    for node in filter(is_loop, gm.graph.nodes):
        for inner in node.target.graphs:  # type: ignore[union-attr]
            found |= _by_file(inner)
    return found
