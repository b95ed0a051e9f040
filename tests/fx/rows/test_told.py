"""What a primitive is told of a batch: padding writes nowhere, and offsets never fall."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import toys
from torch import Tensor

import fngraph as fg
from fngraph.errors import FieldError, RowsError
from fngraph.ops import PRIMITIVES
from fngraph.ops.paged.config import AttentionMeta

S = toys.S


def batch_of(**fields: Any) -> type:
    """A batch of attention whose fields are padded otherwise, or that has others as well."""
    own = {
        "token_ids": fg.buffer("T", "int64"), "slot_mapping": fg.buffer("T", "int64", pad=-1),
        "seq_lens": fg.buffer("R", "int32"),
        "query_start_loc": fg.buffer("R + 1", "int32", pad="stride"),
        "block_tables": fg.buffer("R B", "int32"), **fields, "spec": fg.host(),
    }  # fmt: skip
    kinds = {name: fg.BatchSpec if name == "spec" else Tensor for name in own}
    return fg.struct(type("Batch", (), {**own, "__annotations__": kinds}))


Make = Callable[[Any], dict[str, Tensor]]  # what attention gets in place of the batch's own leaf


def same(batch: Any) -> dict[str, Tensor]:
    return {}


WRONG: dict[str, tuple[dict[str, Any], Make, type[Exception], str]] = {
    "a slot for padding": (
        {"slot_mapping": fg.buffer("T", "int64", pad=0)}, same, FieldError,
        r"batch.slot_mapping says where a primitive writes, .* fg.buffer\(..., pad=-1\)",
    ),
    "offsets that fall": (
        {"query_start_loc": fg.buffer("R + 1", "int32")}, same, FieldError,
        r'batch.query_start_loc says where requests begin, .* pad="stride"',
    ),
    "slots that are made": (
        {"block": fg.buffer("T", "int64"), "at": fg.buffer("T", "int64")},
        lambda b: {"slot_mapping": b.block * S + b.at}, RowsError,
        r"test_told.py:\d+: forward makes slot_mapping.*fg.trust_rows",
    ),
    "slots of which some are chosen": (
        {}, lambda b: {"slot_mapping": torch.where(b.token_ids > 3, b.slot_mapping, 0)}, RowsError,
        "forward makes slot_mapping",
    ),
    "offsets that are made": (
        {}, lambda b: {"query_start_loc": b.query_start_loc * 1 % 9}, RowsError,
        "forward makes query_start_loc",
    ),
}  # fmt: skip
RIGHT: dict[str, Make] = {
    "as they are": same,
    "in another dtype": lambda b: {
        "slot_mapping": b.slot_mapping.int().long(), "query_start_loc": b.query_start_loc.long(),
    },
    "slots chosen by padding": lambda b: {
        "slot_mapping": torch.where(b.slot_mapping >= 0, b.slot_mapping + 0, -1)
    },
    "vouched for": lambda b: {
        "slot_mapping": fg.trust_rows(b.slot_mapping * 2 - b.slot_mapping),
        "query_start_loc": fg.trust_rows(b.query_start_loc * 2 - b.query_start_loc),
    },
}  # fmt: skip


def attending(make: Make) -> Callable[..., Any]:
    def forward(params: Any, cache: Any, batch: Any) -> Any:
        given = {name: getattr(batch, name) for name in ("token_ids", *AttentionMeta._fields)}
        return toys.attend(params, cache, Given(**given | make(batch)))

    return forward


class Given:
    """Anything with the fields that attention reads."""

    def __init__(self, **fields: Tensor) -> None:
        vars(self).update(fields)


def run(kind: type, make: Make, *, trains: bool = False) -> Any:
    """(logits, cache) of a batch in a key of more tokens and requests, and of bare `forward`."""
    like, params = toys.batch(3, 2), toys.attention_params()
    if trains:
        params["embed"].requires_grad_()
    leaves = {name: getattr(like, name) for name in fg.core.buffers_of(type(like))}
    more = {"block": like.slot_mapping // S, "at": like.slot_mapping % S}
    names = fg.core.buffers_of(kind)
    batch = kind(spec=like.spec, **{name: (leaves | more)[name] for name in names})
    forward = attending(make)
    want = toys.bare(forward, params, toys.attention_cache(), batch)
    forward.__annotations__["batch"] = kind
    fast = fg.graphify(
        forward, donate="cache", stage="batch", limits=toys.LIMITS, sizes=(8,), modes="FULL"
    )
    return fast(params, toys.attention_cache(), batch), want


@pytest.mark.parametrize("trains", [False, True], ids=["called", "under a gradient"])
@pytest.mark.parametrize("name", WRONG)
def test_padding_that_would_reach_a_true_row_is_refused(name: str, trains: bool) -> None:
    fields, make, error, told = WRONG[name]
    with pytest.raises(error, match=told):
        run(batch_of(**fields), make, trains=trains)


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_equals_bare_forward(name: str) -> None:
    toys.assert_trees(*run(batch_of(), RIGHT[name]), **toys.CLOSE)


def test_every_primitive_says_where_it_writes_and_where_requests_begin() -> None:
    told = 0
    for name, primitive in PRIMITIVES.items():
        arguments = {a.name for a in primitive.op._schema.arguments}
        slots = arguments & {"slot_mapping", "state_slots"}
        assert ({primitive.null_slots} - {None}) == slots, name
        offsets = arguments & {"query_start_loc", "cu_seqlens"}
        assert ({primitive.offsets} - {None}) == offsets, name
        told += bool(slots)
    assert told >= 5
