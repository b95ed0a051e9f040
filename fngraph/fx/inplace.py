"""In place: a leaf's new value is computed in the leaf's own buffer, if nothing is lost by it.

Each op of a chain makes the next version of the buffer. A chain will do if its values lie where the
buffer's elements do, and if each version is read for the last time before the next one begins.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from itertools import chain as joined, islice

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from fngraph.fx import twins
from fngraph.fx.chains import Hop, chains
from fngraph.fx.leaves import same_place, same_strides
from fngraph.fx.liveness import Memory, distinct_elements, keys, overlap
from fngraph.fx.rewrite import mutates, rerun, rewrite, scatter_region, view_as

_TRIES = 16  # chains of a kind for one leaf; the first or second will do in all but odd programs


def settle(new: fx.Node, buffer: fx.Node, memory: Memory) -> str | None:
    """Rewrite the graph so that `new` is computed in `buffer`; or say why it cannot be."""
    if keys(new) == keys(buffer):
        return "it is not the buffer's elements in the buffer's order"
    why = None
    ways = (islice(chains(new, buffer, from_nothing=x), _TRIES) for x in (False, True))
    for chain in joined.from_iterable(ways):
        obstacle = misfit(chain, buffer, memory) or still_needed(chain, buffer, memory)
        if obstacle is None:
            rewrite(chain, buffer, memory)
            return None
        why = why or obstacle
    return why or "it has no form that works in place"


def misfit(chain: Sequence[Hop], buffer: fx.Node, memory: Memory) -> str | None:
    """What keeps a chain's values from lying where they would have to, if anything does."""
    last = buffer.meta["val"]
    place: dict[fx.Node, torch.Tensor] = {}
    for hop in chain:
        if hop.operand is None:
            here = view_as(buffer, hop.node)
        else:
            here = place.get(hop.operand, hop.operand.meta["val"])
        obstacle = _lies_otherwise(hop, here, chain, memory)
        if obstacle is None and hop.how != "alias":
            obstacle = _clash(hop, {key for n in (buffer, *place) for key in keys(n)})
        if obstacle is not None:
            return obstacle
        assert here is not None
        last = here
        if hop.how == "alias" and hop.operand is not None and not mutates(hop.node):
            try:
                last = rerun(hop.node, {hop.operand: here})
            except (RuntimeError, ValueError):  # as fakes raise for views that cannot be
                return f"{hop} cannot view the buffer, which is laid out otherwise"
        place[hop.node] = last
    if not same_place(last, buffer.meta["val"]):
        return "it is not the buffer's elements in the buffer's order"
    return None


def _lies_otherwise(
    hop: Hop, here: torch.Tensor | None, chain: Sequence[Hop], memory: Memory
) -> str | None:
    """Whether a value, or a view of it, would be something else if it lay `here`."""
    members = memory.members[keys(hop.node)[0]]
    if any(_moves_strangely(n) for n in ([hop.node] if hop.how == "alias" else members)):
        return f"{hop} is viewed by counting from the start of its storage"
    if hop.how == "alias":
        return None
    if here is None or not distinct_elements(here):
        return f"{hop} makes other elements than the buffer has"
    if not same_strides(here, hop.node.meta["val"]):
        if hop.how != "scatter" and not twins.rounds_alike(hop.node.target):
            return f"{hop} makes another layout than the buffer's"
        ours = {hop.node for hop in chain}
        readers = {use.node for use in memory.uses(keys(hop.node)[0]) if use.time < math.inf}
        if not ours.issuperset([*members, *readers]):  # these might round another way
            return f"{hop} is read in a layout that the buffer does not have"
    return None


def _moves_strangely(node: fx.Node) -> bool:
    """Whether a view's place follows from more than that of what it views."""
    op = node.target
    if not isinstance(op, torch._ops.OpOverload):
        return op is not operator.getitem  # a higher-order op
    if op._schema.is_mutable and not isinstance(node.meta["val"], torch.Tensor):
        return True
    return "as_strided" in op._schema.name or torch.Tag.inplace_view in op.tags


def _clash(hop: Hop, ours: set[int]) -> str | None:
    """Whether an op would read, through another argument, what it is about to write."""
    if twins.reads_nothing(hop.node.target):
        return None
    arguments = [a for a in tree_leaves((hop.node.args, hop.node.kwargs)) if isinstance(a, fx.Node)]
    arguments = [a for a in arguments if ours.intersection(keys(a))]
    message = f"{hop} still reads the old value where it would write the new one"
    if hop.operand is None:
        return message if arguments else None
    arguments.remove(hop.operand)
    target = hop.operand.meta["val"]
    if hop.how == "scatter":
        target = scatter_region(hop.node, target)
    over = hop.how == "scatter" or twins.is_pointwise(hop.node.target)
    for argument in arguments:
        value = argument.meta["val"]
        if keys(argument) != keys(hop.operand) or (
            overlap(value, target) and not (over and _exactly(value, target))
        ):
            return message
    return None


def _exactly(a: torch.Tensor, b: torch.Tensor) -> bool:
    static = all(isinstance(n, int) for n in (*a.shape, *a.stride(), a.storage_offset()))
    return static and a.dtype == b.dtype and same_place(a, b)


def still_needed(chain: Sequence[Hop], buffer: fx.Node, memory: Memory) -> str | None:
    """Which op comes for a version of the buffer after the next one has begun, if any does."""
    makers = [hop for hop in chain if hop.how != "alias"]
    storages = [keys(buffer)[0], *(keys(hop.node)[0] for hop in makers)]
    ends: list[float] = []  # when each version but the last is written over, latest first
    for hop, key in zip(reversed(makers), reversed(storages[1:])):
        end: float = memory.at[hop.node]
        if hop.how == "same":  # a clone is the old value too, until either is written
            later = [u.time for u in memory.uses(key) if u.writes]
            end = min([*later, *ends[-1:]], default=math.inf)
        ends.append(end)
    for hop, key, end in zip(makers, storages, reversed(ends)):
        for use in memory.uses(key):
            limit = memory.at[hop.node] if use.writes else end
            if use.node is not hop.node and use.time >= limit and limit < math.inf:
                return f"{use} the old value after {hop} made the new one"
    return None
