"""What a loop gives may be, in Python, a tensor that was there before: then nobody may write it.

    r = fg.cond(pred, lambda: s, lambda: s * 2)
    r.add_(1)                                        # in Python s too, if pred holds

A node gives memory of its own. So it makes no difference until one of the two is written, and the
other one is read after that. Of each storage it is worked out which others it may be in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from fngraph.errors import AliasError
from fngraph.fx.donation.liveness import Memory, keys
from fngraph.fx.loops.node import Loop
from fngraph.fx.nodes import inputs_of, is_loop, line_of, results_of
from fngraph.torch_facts.memory import storage_key

_Key = int | tuple[str, Any]  # of a storage; or ("earlier", key): what it was at an earlier turn
_May = dict[_Key, set[_Key]]
"""By a storage's key: the keys of others that it may be, in one step."""


def check_aliases(
    gm: fx.GraphModule, returns: Mapping[int, int], refuse: Callable[[AliasError], None]
) -> None:
    """Refuse what would be written for two in Python, and for one in a graph.

    Args:
        returns: index of a donated leaf to the index of the output that is its new value.

    Raises:
        AliasError: naming the op that writes, the loop, and who reads later.
    """
    if any(map(is_loop, gm.graph.nodes)):
        may: _May = {}
        _collect(gm, may)
        inputs, results = inputs_of(gm.graph), results_of(gm.graph)
        news = {keys(inputs[k])[0]: keys(results[i])[0] for k, i in returns.items()}
        _check(gm, may, news, refuse)


def _collect(gm: fx.GraphModule, may: _May) -> None:
    for node in gm.graph.nodes:
        if not isinstance(loop := node.target, Loop):
            continue
        for inner in loop.graphs:
            _collect(inner, may)
        if loop.kind == "cond":
            for result, *news in zip(loop.results, *(results_of(gm.graph) for gm in loop.graphs)):
                may[storage_key(result)] = {keys(new)[0] for new in news}
            continue
        body = loop.graphs[-1].graph
        inputs = inputs_of(body)
        same = {key for x in inputs for key in keys(x)}  # at each turn
        for given, mine in zip(node.args[: loop.own], inputs):
            may[keys(mine)[0]] = set(keys(given))
        for mine, new, result in zip(inputs[: loop.state], results_of(body), loop.results):
            before, after = keys(mine)[0], keys(new)[0]
            may[before] |= {x if x in same else ("earlier", x) for x in _reached(after, may)}
            no_turn = loop.kind == "while_loop" or not loop.turns
            may[storage_key(result)] = {after, *((before,) if no_turn else ())}


def _reached(key: _Key, may: _May) -> set[_Key]:
    """All that a storage may be, itself among them."""
    found: set[_Key] = {key}
    left = [key]
    while left:
        more = may.get(left.pop(), set()) - found
        found |= more
        left += more
    return found


def _check(
    gm: fx.GraphModule, may: _May, news: Mapping[int, int],
    refuse: Callable[[AliasError], None], within: fx.Node | None = None,
) -> None:  # fmt: skip
    memory = Memory(gm.graph)
    loops = list(filter(is_loop, gm.graph.nodes))
    begins = {storage_key(x): node for node in loops for x in node.target.results}  # type: ignore[union-attr]
    inputs = {key for node in inputs_of(gm.graph) for key in keys(node)}
    here = {key: _reached(key, may) for key in memory.members if key in may}
    for one, reached in here.items():
        others = [x for x in reached if x in memory.members]
        others += [x for x in here if x not in reached and here[x] & reached]
        for other in others:
            if other == one:
                continue
            if error := _error(one, other, memory, begins, inputs, news, within):
                refuse(error)
                return
    for node in loops:
        for inner in node.target.graphs:  # type: ignore[union-attr]
            if (error := _stacked(node, inner, may)) is not None:
                refuse(error)
                return
            _check(inner, may, {}, refuse, node)


def _stacked(node: fx.Node, body: fx.GraphModule, may: _May) -> AliasError | None:
    """Of a scan: a row may be memory from around it that its turns write. In Python each row would
    then be as the last turn leaves it."""
    if not isinstance(loop := node.target, Loop) or loop.kind != "scan":
        return None
    memory, around = Memory(body.graph), {key for x in inputs_of(body.graph) for key in keys(x)}
    for y in results_of(body.graph)[loop.state :]:
        reached = _reached(keys(y)[0], may)
        for key in filter(reached.__contains__, around):
            for write in memory.uses(key):
                if write.writes:
                    return AliasError(
                        f"{line_of(write.node)}: a turn of {loop} ({loop.line}) writes "
                        f"({write.node.target}) a tensor that is there for all turns, and gives it "
                        "as its row too: in Python all rows would be that one tensor, as the last "
                        "turn leaves it. Give a copy: y.clone()"
                    )
    return None


def _error(
    one: int, other: int, memory: Memory, begins: Mapping[int, fx.Node], inputs: set[int],
    news: Mapping[int, int], within: fx.Node | None,
) -> AliasError | None:  # fmt: skip
    """Of two storages that may be one in Python: who writes either, where the other is read on.

    Args:
        within: the loop whose function it is in.
    """
    start = max((memory.at[begins[x]] for x in (one, other) if x in begins), default=-1)
    for a, b in ((one, other), (other, one)):
        for write in memory.uses(a):
            if not write.writes or write.time <= start:
                continue
            readers = [
                use for use in memory.uses(b)
                if use.time > write.time or (use.node is write.node and is_loop(use.node))
            ]  # fmt: skip
            if readers or (b in inputs and a not in inputs and news.get(b) != a):
                loop = next((begins[x] for x in (a, b) if x in begins), within)
                return _told(write.node, loop, next((str(x) for x in readers), "the caller's own"))
    return None


def _told(write: fx.Node, loop: fx.Node | None, later: str) -> AliasError:
    which = "a loop" if loop is None else f"{loop.target} ({line_of(loop)})"
    return AliasError(
        f"{line_of(write)}: forward writes ({write.target}) what {which} is given, or gives back, "
        "which in Python may be one with another tensor: a function that returns what is there, or "
        "a loop that takes no turn, gives that very tensor, and in a graph a copy of it. "
        f"The other one is needed later: {later}. Make a new value in place of writing, x + y; or "
        "let the function return a copy, x.clone()"
    )
