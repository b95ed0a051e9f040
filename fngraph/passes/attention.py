"""The rotary embedding of queries and keys inside of the attention that reads them.

    q, k = rope(q, cos, sin), rope(k, cos, sin); attention(q, k, v, ...)
                                                   ->  attention(q, k, v, ..., cos, sin)

Attention writes keys and values to the cache; what turns its queries and keys goes into the call. A
backend with the option "rope" turns them and writes in one launch; for another the call turns them
first, an op each. So the cache has one writer, as before, and padding goes by its slots.

What turns them are the ops of the passes `norm_rope` and `rope`, which come first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fngraph.fx.nodes import is_op
from fngraph.passes.frame import Rewritten
from fngraph.passes.pattern import insert, is_dense, is_written_between, sizes

aten = torch.ops.aten
_ROPE, _NORM_ROPE = "fngraph::rope", "fngraph::norm_rope"


def rope_in_attention(graph: fx.Graph) -> Rewritten:
    """Attention whose q and k are turned by one pair of angles, and read by nobody else."""
    calls = [node for node in graph.nodes if _name(node) == "fngraph::attention"]
    matches = sum(_put(graph, node) for node in calls)
    notes = () if matches or not calls else (_NOTE,)
    return Rewritten(graph, matches, notes)


_NOTE = (
    "no attention has queries and keys that both come from the ops of norm_rope or rope, by the "
    'same angles and for it alone. Those passes come before: passes=("norm_rope", "rope", '
    '"rope_in_attention")'
)


def _name(node: Any) -> str:
    return node.target._schema.name if isinstance(node, fx.Node) and is_op(node) else ""  # type: ignore[union-attr]


def _put(graph: fx.Graph, call: fx.Node) -> bool:
    names = [a.name for a in call.target._schema.arguments]  # type: ignore[union-attr]
    given: dict[str, Any] = dict(zip(names, call.args, strict=True))
    pair: list[fx.Node] = [given["q"], given["k"]]
    ropes = [_rope_of(x) for x in pair]
    q, k = ropes
    if q is None or k is None or q is k or given["cos"] is not None:
        return False
    if any(user is not call and user.target not in _ASK for x in pair for user in x.users):
        return False
    (x, *how), (y, *how_k) = q.args, k.args
    norms = (how.pop(0), how_k.pop(0)) if _name(q) == _NORM_ROPE else (None, None)
    if q.target is not k.target or not all(map(_are_one, how, how_k)):
        return False
    if is_written_between(sorted((q, k)), until=call):
        return False
    cos, sin = (_flat(graph, q, one) for one in how[:2])
    turn = cos, sin, *norms, *(how[2:] or (0.0, False))
    given |= {"q": _flat(graph, q, x), "k": _flat(graph, k, y)}
    given |= dict(zip(("cos", "sin", "q_norm", "k_norm", "eps", "centred"), turn, strict=True))
    call.args = tuple(given.values())
    for old, new in zip(pair, (given["q"], given["k"])):
        old.replace_all_uses_with(new)  # of what asks for its size or dtype
    for rope, old in zip((q, k), pair):
        while old is not rope:
            gone, old = old, old.args[0]  # type: ignore[assignment]
            graph.erase_node(gone)
        graph.erase_node(rope)
    return True


_ASK = (aten.new_zeros.default, aten.new_empty.default, aten.sym_size.int)
"""Ops that ask a tensor for its dtype, its device or a size, and read none of its elements."""
_VIEWS = (aten.transpose.int, aten.select.int)


def _rope_of(x: fx.Node) -> fx.Node | None:
    """The op that turns what a call reads as (T, H, D): itself, or of one row of (1, T, H, D)."""
    made = x
    while made.target in _VIEWS:
        made = made.args[0]  # type: ignore[assignment]
        if len(made.users) > 1:
            return None
    if _name(made) not in (_ROPE, _NORM_ROPE) or x.meta["val"].storage_offset() != 0:
        return None
    rows = sizes(made) if made is x else sizes(made)[1:]
    whole = made is x or sizes(made)[0] == 1
    return made if whole and sizes(x) == rows and is_dense(x) else None


def _are_one(a: Any, b: Any) -> bool:
    """Whether two arguments are one value, or one value with dims put in alike."""
    if not isinstance(a, fx.Node) or a is b:
        return bool(a is b or (not isinstance(b, fx.Node) and a == b))
    same = isinstance(b, fx.Node) and a.target is b.target is aten.unsqueeze.default
    return same and a.args == b.args


def _flat(graph: fx.Graph, rope: fx.Node, x: fx.Node) -> fx.Node:
    """What an op reads as (T, ...), where it reads (1, T, ...)."""
    if len(sizes(rope)) == 3:
        return x
    return insert(graph, rope, aten.select.int, (x, 0, 0))
