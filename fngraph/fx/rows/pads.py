"""What a primitive asks of padding: it writes nowhere, and offsets never fall.

A primitive leaves padding out by what it is told of the batch. So what it is told must be right for
a key's padding, whether it is a staged leaf, whose field says its pad, or made in `forward`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fngraph.errors import FieldError, FnGraphError, RowsError
from fngraph.fx.advice import valid
from fngraph.fx.leaves import Leaf
from fngraph.fx.nodes import inputs_of, line_of
from fngraph.fx.rows.check import vouched_for
from fngraph.fx.rows.loops import Several
from fngraph.fx.rows.state import OFFSETS, RISING, Fill, Kept, moving_dims

NOWHERE = "nowhere"  # a slot below 0


def check_pads(
    gm: fx.GraphModule,
    leaves: Sequence[Leaf],
    facts: Mapping[fx.Node, Any],
    asked: Callable[[fx.Node], Mapping[str, tuple[fx.Node, str]]],
    refuse: Callable[[FnGraphError], None],
) -> None:
    """Refuse what primitives are told of padding and must not be.

    Args:
        facts: what `facts_of` says of the graph.
        asked: of a node, by the argument's name what is passed there, and the padding that it must
            have, `NOWHERE` or `OFFSETS`; nothing of most nodes.

    Raises:
        FieldError: a leaf with another pad.
        RowsError: what `forward` makes, of which that is not known.
    """
    leaf_of = dict(zip(inputs_of(gm.graph), leaves))
    for node in gm.graph.nodes:
        for name, (told, what) in asked(node).items():
            state = facts.get(told)
            if not isinstance(state, Kept) or 0 not in moving_dims(told):
                continue
            if not _is(state.fills.get(0), what) and told not in vouched_for(gm):
                refuse(_error(node, name, told, leaf_of.get(told), what))
    for node, state in facts.items():
        if isinstance(state, Several):
            for inner, known in zip(node.target.graphs, state.graphs):  # type: ignore[union-attr]
                check_pads(inner, (), known, asked, refuse)


def _is(fill: Fill | None, what: str) -> bool:
    if what == OFFSETS:
        return isinstance(fill, str) and fill in (OFFSETS, RISING)
    return isinstance(fill, torch.Tensor) and bool((fill < 0).all())


def _error(node: fx.Node, name: str, told: fx.Node, leaf: Leaf | None, what: str) -> FnGraphError:
    says, must, wrong, field, choice = _SAID[what]
    if leaf is not None:
        return FieldError(f"{line_of(node)}: {leaf.path} {says}, and {wrong}. Pad it {field}")
    return RowsError(
        f"{line_of(told)}: forward makes {name}, which {says}, and it is not known that a key's "
        f"padding {must} there: {wrong}. {choice}; or vouch for it: fg.trust_rows(...)"
    )


_FIELD = (
    'fg.buffer("R + 1", "int32", pad="stride"), or pad="last", by which padding is in no sequence'
)
_SAID = {
    NOWHERE: (
        "says where a primitive writes", "is -1", "its padding would write too",
        "with -1, which writes nowhere: fg.buffer(..., pad=-1)",
        f"Choose it where it is true: {valid('T')}torch.where(valid, slots, -1)",
    ),
    OFFSETS: (
        "says where requests begin", "goes on rising", "true tokens would be another request's",
        f"so that it goes on: {_FIELD}", f"Stage it: {_FIELD}",
    ),
}  # fmt: skip
