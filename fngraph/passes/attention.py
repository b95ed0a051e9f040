"""What goes before attention and behind it inside of its call: rotary embedding, rounding to fp8.

    q, k = rope(q, cos, sin), rope(k, cos, sin); attention(q, k, v, ...)
                                                   ->  attention(q, k, v, ..., cos, sin)

Attention writes keys and values to the cache; what turns its queries and keys goes into the call. A
backend with the option "rope" turns them and writes in one launch; for another the call turns them
first, an op each. So the cache has one writer, as before, and padding goes by its slots.

What turns them are the ops of the passes `norm_rope` and `rope`, which come first. And where a
product in fp8 rounds the output by a scale that is known before, and nobody else reads it, the call
does that: with a backend of the option "fp8 output" in the kernel that makes it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fngraph.fx.nodes import op_name, storages_written
from fngraph.passes.pattern import (
    dtype_of,
    insert,
    is_dense,
    is_written_between,
    sizes,
    writes_any,
)
from fngraph.passes.running.checks import Rewritten
from fngraph.torch_facts.memory import storage_key

aten = torch.ops.aten
_ROPE, _NORM_ROPE = "fngraph::rope", "fngraph::norm_rope"


def rope_in_attention(graph: fx.Graph) -> Rewritten:
    """Attention whose q and k are turned by one pair of angles, and read by nobody else."""
    calls = [node for node in graph.nodes if op_name(node) == "fngraph::attention"]
    matches = sum(_put(graph, node) for node in calls)
    notes = () if matches or not calls else (_NOTE,)
    return Rewritten(graph, matches, notes)


_NOTE = (
    "no attention has queries and keys that both come from the ops of norm_rope or rope, by the "
    'same angles and for it alone. Those passes come before: passes=("norm_rope", "rope", '
    '"rope_in_attention")'
)


def attention_fp8(graph: fx.Graph) -> Rewritten:
    """Attention whose output is rounded to fp8 by a known scale, and read by nobody else."""
    rounds = [node for node in graph.nodes if op_name(node) == "fngraph::quantize_fp8"]
    return Rewritten(graph, sum(_round_in_call(graph, node) for node in rounds))


def _round_in_call(graph: fx.Graph, rounds: fx.Node) -> bool:
    """Let the attention round whose output, seen as (T, H * D), a node rounds."""
    seen, scale = rounds.args
    if not isinstance(seen, fx.Node) or seen.target is not aten.view.default:
        return False
    out: Any = seen.args[0]
    calls = [user for user in out.users if op_name(user) == "fngraph::attention"]
    if out.target is not aten.new_empty.default or set(out.users) != {*calls, seen}:
        return False
    if len(calls) != 1 or set(seen.users) != {rounds} or not calls[0] < seen:
        return False
    (call,) = calls
    given = _arguments(call)
    places = [name for name, x in given.items() if x is out]
    if places != ["out"] or given["out_scale"] is not None or not scale < call:  # type: ignore[operator]
        return False
    if dtype_of(out) != dtype_of(given["q"]) or _is_rewritten(call, rounds):
        return False
    with graph.inserting_before(out):
        narrow = graph.call_function(
            out.target, out.args, {**out.kwargs, "dtype": torch.float8_e4m3fn}
        )
    narrow.meta = {key: value for key, value in out.meta.items() if key != "val"}
    call.args = tuple((given | {"out": narrow, "out_scale": scale}).values())
    rounds.replace_all_uses_with(insert(graph, rounds, seen.target, (narrow, *seen.args[1:])))
    for node in (rounds, seen, out):
        graph.erase_node(node)
    return True


def _is_rewritten(call: fx.Node, rounds: fx.Node) -> bool:
    """Whether the output or the scale is written between the call and what rounds it."""
    memory = {storage_key(x.meta["val"]) for x in rounds.all_input_nodes}
    node = call.next
    while node is not rounds:
        if writes_any(node, memory):
            return True
        node = node.next
    return storage_key(rounds.args[1].meta["val"]) in storages_written([call])  # type: ignore[union-attr]


def _arguments(call: fx.Node) -> dict[str, Any]:
    names = [a.name for a in call.target._schema.arguments]  # type: ignore[union-attr]
    return dict(zip(names, call.args, strict=True))


def _put(graph: fx.Graph, call: fx.Node) -> bool:
    given = _arguments(call)
    pair: list[fx.Node] = [given["q"], given["k"]]
    ropes = [_rope_of(x) for x in pair]
    q, k = ropes
    if q is None or k is None or q is k or given["cos"] is not None:
        return False
    if any(user is not call and user.target not in _ASK for x in pair for user in x.users):
        return False
    (x, *how), (y, *how_k) = q.args, k.args
    norms = (how.pop(0), how_k.pop(0)) if op_name(q) == _NORM_ROPE else (None, None)
    if q.target is not k.target or not all(map(_are_one, how, how_k)):
        return False
    if dtype_of(how[0]) != dtype_of(x):  # turned in float32, which attention does not
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
    if op_name(made) not in (_ROPE, _NORM_ROPE) or x.meta["val"].storage_offset() != 0:
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


def _flat(graph: fx.Graph, rope: fx.Node, x: Any) -> Any:
    """What an op reads as (T, ...), where it reads (1, T, ...)."""
    if len(sizes(rope)) == 3:
        return x
    return insert(graph, rope, aten.select.int, (x, 0, 0))
