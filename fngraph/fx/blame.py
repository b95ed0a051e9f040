"""From an exception in generated code back to the op, and the user's line that it comes from."""

from __future__ import annotations

import linecache

from torch import fx


def blame(gm: fx.GraphModule, error: BaseException) -> str | None:
    """`aten.mm.default, from model.py:12`, or None if `error` did not pass through `gm`'s code.

    fx compiles a graph to a file `<eval_with_key>.N` with one statement a node, `name = op(...)`.
    """
    by_name = {node.name: node for node in gm.graph.nodes}
    found = None
    traceback = error.__traceback__
    while traceback is not None:
        filename = traceback.tb_frame.f_code.co_filename
        if filename.startswith("<eval_with_key"):
            statement = linecache.getline(filename, traceback.tb_lineno)
            found = by_name.get(statement.partition("=")[0].strip().partition(":")[0], found)
        traceback = traceback.tb_next
    if found is None:
        return None
    return f"{found.target}, from {found.meta.get('stack_trace', 'forward')}"
