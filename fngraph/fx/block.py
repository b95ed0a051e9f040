"""`block`: a layer's body is traced once, and stamped for each further call that would trace alike.

A model runs one body many times over leaves that differ in their memory alone. In a trace, the
first such call runs the body; a later one with an equal key copies the graph nodes that it left,
with this call's tensors in the place of the first one's. The graph is the one that running the body
would have given. What cannot be told to be alike is run: that is slower, and never wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode

from fngraph.core import trees
from fngraph.core.where import user_line
from fngraph.fx.call_keys import call_of
from fngraph.fx.purity import PurityMode
from fngraph.fx.stamp import stamp_of

Body = TypeVar("Body", bound=Callable[..., Any])


def block(fn: Body) -> Body:
    """Mark a layer's body, so that a trace runs it once and stamps it for the other layers.

    Outside a trace it is `fn` itself. In one, a call is stamped if an earlier one was alike in all
    that the body can see of it: structure; shape, dtype, strides, device and role of each tensor;
    which tensors share memory; every other argument, default and closed-over value; autocast and
    other ambient state. The graph is the same as without, with the body's own lines.

    A body is run at each call, as without the mark, where this cannot be told: inside a transform
    (`torch.func.grad`, `vmap`) or where gradients are recorded, and with arguments that are not
    tensors, trees or hashable values, such as a module or an object with a state of its own.

    Like the rest of `forward`, the body must be pure. What Python reads from globals, or changes
    there, is not seen: a counter in a global would count one layer.

    Args:
        fn: any function of trees of tensors and hashable values, to trees of tensors.
    """

    @functools.wraps(fn)
    def body(*args: Any, **kwargs: Any) -> Any:
        mode = None if torch.compiler.is_compiling() else _get_current_dispatch_mode()
        if not isinstance(mode, PurityMode):
            return fn(*args, **kwargs)
        return _trace_or_stamp(mode, fn, args, kwargs)

    return body  # type: ignore[return-value]


def _trace_or_stamp(mode: PurityMode, fn: Any, args: Any, kwargs: Any) -> Any:
    proxies = get_proxy_mode()
    assert proxies is not None
    tracer: Any = proxies.tracer
    call = call_of(fn, args, kwargs, mode.owners, tracer)
    if call is None:
        return fn(*args, **kwargs)
    if call.key not in mode.blocks:
        before = len(tracer.graph.nodes)
        out = fn(*args, **kwargs)
        after = call_of(fn, args, kwargs, mode.owners, tracer)
        nodes = list(tracer.graph.nodes)[before:]
        mode.blocks[call.key] = stamp_of(call, after, nodes, out, tracer)
        return out
    stamp = mode.blocks[call.key]
    if stamp is None:
        return fn(*args, **kwargs)
    out = stamp.again(call, tracer)
    mode.made.note(trees.flatten(out)[0], user_line())
    return out
