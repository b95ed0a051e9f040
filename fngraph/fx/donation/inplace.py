"""In place: a leaf's new value is computed in the leaf's own buffer, if nothing is lost by it.

Each op of a chain makes the next version of the buffer. A chain will do if its values lie where the
buffer's elements do, and if each version is read for the last time before the next one begins. Its
ops are put into their in-place forms then, and every fake is kept truthful.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from itertools import chain as joined, islice
from typing import Any

import torch
from torch import fx

from fngraph.fx import schemas
from fngraph.fx.donation.chains import Hop, leading_to
from fngraph.fx.donation.liveness import Memory, keys
from fngraph.fx.leaves import same_place, same_strides
from fngraph.fx.nodes import is_loop, is_op, mutates, operands, written_by
from fngraph.fx.schemas import named
from fngraph.torch_facts.memory import is_static, overlap, overlaps_itself
from fngraph.torch_facts.tracing import enable_python_dispatcher

aten = torch.ops.aten
_TRIES = 16  # chains of a kind for one leaf; the first or second will do in all but odd programs


def make_in_place(new: fx.Node, buffer: fx.Node, memory: Memory) -> str | None:
    """Rewrite the graph so that `new` is computed in `buffer`; or say why it cannot be."""
    if keys(new) == keys(buffer):
        return "it is not the buffer's elements in the buffer's order"
    why = None
    ways = (islice(leading_to(new, buffer, from_nothing=x), _TRIES) for x in (False, True))
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
    if here is None or overlaps_itself(here):
        return f"{hop} makes other elements than the buffer has"
    if hop.how == "carry" and not same_strides(here, hop.node.meta["val"]):
        return f"{hop} makes another layout than the buffer's"
    if not same_strides(here, hop.node.meta["val"]):
        if hop.how != "scatter" and not schemas.rounds_alike(hop.node.target):
            return f"{hop} makes another layout than the buffer's"
        ours = {hop.node for hop in chain}
        readers = {use.node for use in memory.uses(keys(hop.node)[0]) if use.time < math.inf}
        if not ours.issuperset([*members, *readers]):  # these might round another way
            return f"{hop} is read in a layout that the buffer does not have"
    return None


def _moves_strangely(node: fx.Node) -> bool:
    """Whether a view's place follows from more than that of what it views."""
    op: Any = node.target
    if not is_op(node):
        return op is not operator.getitem and not is_loop(node)  # a higher-order op
    if mutates(node) and not isinstance(node.meta["val"], torch.Tensor):
        return True
    return "as_strided" in op._schema.name or torch.Tag.inplace_view in op.tags


def _clash(hop: Hop, ours: set[int]) -> str | None:
    """Whether an op would read, through another argument, what it is about to write."""
    message = f"{hop} still reads the old value where it would write the new one"
    if hop.how == "carry":
        i = hop.node.args[1]
        others = [a for j, a in enumerate(hop.maker.args) if j != i and isinstance(a, fx.Node)]
        return message if any(ours.intersection(keys(a)) for a in others) else None
    if schemas.reads_nothing(hop.node.target):
        return None
    arguments = [a for a in operands(hop.node) if ours.intersection(keys(a))]
    if hop.operand is None:
        return message if arguments else None
    arguments.remove(hop.operand)
    target = hop.operand.meta["val"]
    if hop.how == "scatter":
        target = scatter_region(hop.node, target)
    over = hop.how == "scatter" or schemas.is_pointwise(hop.node.target)
    for argument in arguments:
        value = argument.meta["val"]
        if keys(argument) != keys(hop.operand) or (
            overlap(value, target) and not (over and _exactly(value, target))
        ):
            return message
    return None


def _exactly(a: torch.Tensor, b: torch.Tensor) -> bool:
    return is_static(a) and a.dtype == b.dtype and same_place(a, b)


def still_needed(chain: Sequence[Hop], buffer: fx.Node, memory: Memory) -> str | None:
    """Which op comes for a version of the buffer after the next one has begun, if any does."""
    makers = [hop for hop in chain if hop.how != "alias"]
    storages = [keys(buffer)[0], *(keys(hop.node)[0] for hop in makers)]
    ends: list[float] = []  # when each version but the last is written over, latest first
    for hop, key in zip(reversed(makers), reversed(storages[1:])):
        end: float = memory.at[hop.maker]
        if hop.how == "same":  # a clone is the old value too, until either is written
            later = [u.time for u in memory.uses(key) if u.writes]
            end = min([*later, *ends[-1:]], default=math.inf)
        ends.append(end)
    for hop, key, end in zip(makers, storages, reversed(ends)):
        for use in memory.uses(key):
            limit = memory.at[hop.maker] if use.writes else end
            if use.node is not hop.maker and use.time >= limit and limit < math.inf:
                return f"{use} the old value after {hop} made the new one"
    return None


def rewrite(chain: Sequence[Hop], buffer: fx.Node, memory: Memory) -> None:
    """Put each op of a chain into its in-place form. The chain has been checked."""
    (home,) = keys(buffer)
    became: dict[fx.Node, fx.Node] = {}
    for hop in chain:
        if hop.how == "alias":
            continue  # it follows what it views
        node, (key,) = hop.node, keys(hop.node)
        with node.graph.inserting_before(node):
            if hop.operand is not None:
                into = became.get(hop.operand, hop.operand)
            else:
                into = _start(buffer, node, memory)
            _write(hop, into, memory)
        node.replace_all_uses_with(into)
        became[node] = into
        memory.members[key].remove(node)
        node.graph.erase_node(node)
        _follow(key, home, memory)
    for hop in chain:
        node = hop.node
        if hop.how == "alias" and same_place(node.meta["val"], buffer.meta["val"]):
            node.replace_all_uses_with(buffer)  # or a view would cross from piece to piece
            if not mutates(node):
                memory.members[home].remove(node)
                node.graph.erase_node(node)


def _start(buffer: fx.Node, node: fx.Node, memory: Memory) -> fx.Node:
    """The buffer as a node of the shape of `node`."""
    value = view_as(buffer, node)
    assert value is not None
    if value is buffer.meta["val"]:
        return buffer
    return _insert(aten.view.default, (buffer, list(value.shape)), {}, value, node, memory)


def _write(hop: Hop, into: fx.Node, memory: Memory) -> None:
    """Insert the in-place form of an op: it writes `into`."""
    node, value = hop.node, into.meta["val"]
    if hop.how == "carry":
        _seat(hop, into, memory)
        return
    op, args, kwargs = _form(hop, into)
    if hop.how == "scatter":
        region = _insert(op, args, kwargs, scatter_region(node, value), node, memory)
        op, args, kwargs = aten.copy_.default, (region, _named(node)["src"]), {}
        value = region.meta["val"]
    if op is not None:
        _insert(op, args, kwargs, value, node, memory)


def _seat(hop: Hop, into: fx.Node, memory: Memory) -> None:
    """Have a loop's carry lie in `into`."""
    node, i = hop.maker, int(hop.node.args[1])  # type: ignore[arg-type]
    value, (key,) = into.meta["val"], keys(hop.node)
    node.target = node.target.seated(i, value)  # type: ignore[union-attr]
    others = node.meta["val"]
    node.meta["val"] = (*others[:i], value, *others[i + 1 :])
    memory.members[key].remove(node)
    memory.members[keys(into)[0]].append(node)


def _form(hop: Hop, into: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    op: Any = hop.node.target
    args, kwargs = hop.node.args, hop.node.kwargs
    if hop.how == "same":
        return None, (), {}
    if hop.how == "twin":
        return schemas.in_place(op), args, dict(kwargs)
    if hop.how == "scatter":
        return schemas.scattered_view(op), (into,), _window(hop.node)
    if op in schemas.COPIES:
        return aten.copy_.default, (into, args[0]), {}
    if (fill := schemas.fill_form(op)) is not None:
        value = _named(hop.node).get("fill_value")
        shape = list(into.meta["val"].shape)
        return fill, (shape,) if value is None else (shape, value), {"out": into}
    twin, name = schemas.out_form(op)  # type: ignore[misc]
    taken = {a.name for a in twin._schema.arguments}
    return twin, args, {**{k: v for k, v in kwargs.items() if k in taken}, name: into}


def _insert(op: Any, args: Any, kwargs: Any, value: Any, model: fx.Node, memory: Memory) -> fx.Node:
    made = model.graph.call_function(op, args, kwargs)
    made.meta = {k: v for k, v in model.meta.items() if k != "tensor_meta"} | {"val": value}
    memory.add(made, memory.at[model])
    return made


def _follow(key: int, home: int, memory: Memory) -> None:
    """Bring the views of a value that has moved up to date: they are views of the buffer now."""
    for node in sorted(memory.members[key], key=memory.at.__getitem__):
        if node.target is not operator.getitem and mutates(node):
            into = written_by(node)
            node.meta["val"] = next(a.meta["val"] for a in into if home in keys(a))
        else:
            node.meta["val"] = rerun(node, {})
    memory.move(key, home)


def rerun(node: fx.Node, places: dict[fx.Node, torch.Tensor]) -> Any:
    """What a view would be if its arguments were as in `places`."""
    return _fake(node.target, node.args, node.kwargs, places)


def scatter_region(node: fx.Node, base: torch.Tensor) -> torch.Tensor:
    """The view of `base` into which a scatter op copies."""
    view = schemas.scattered_view(node.target)  # type: ignore[arg-type]
    return _fake(view, (base,), _window(node), {})  # type: ignore[no-any-return]


def _window(node: fx.Node) -> dict[str, Any]:
    """Where a scatter op puts its source: the further arguments of the view of the same name."""
    return {k: v for k, v in _named(node).items() if k not in ("self", "src")}


def _named(node: fx.Node) -> dict[str, Any]:
    return named(node.target, node.args, node.kwargs)


def _fake(op: Any, args: Any, kwargs: Any, places: dict[fx.Node, torch.Tensor]) -> Any:
    args, kwargs = fx.map_arg((args, kwargs), lambda n: places.get(n, n.meta["val"]))
    with torch.inference_mode(False), enable_python_dispatcher():
        return op(*args, **kwargs)


def view_as(buffer: fx.Node, node: fx.Node) -> torch.Tensor | None:
    """The buffer in the shape of a node's value, if their elements are in the same order."""
    old, new = buffer.meta["val"], node.meta["val"]
    if old.dtype != new.dtype or old.device != new.device:
        return None
    if all(isinstance(n, int) for n in new.shape) and old.numel() == new.numel():
        if old.shape == new.shape:
            return old
        if old.is_contiguous() and new.is_contiguous():
            return aten.view.default(old, new.shape)
    return None
