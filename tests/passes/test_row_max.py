"""The pass `row_max`, and its op on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import toys
from torch import Tensor

import fngraph as fg
from fngraph.torch_facts.names import tree_leaves

V = 4096
OP = torch.ops.fngraph.row_max
WHERE: dict[str, tuple[Callable[[Tensor], Any], int]] = {
    "argmax": (lambda x: x.argmax(-1), 1),
    "argmax of the last dim by its number, kept": (lambda x: x.argmax(1, keepdim=True), 1),
    "both results of max": (lambda x: tuple(x.max(-1)), 1),
    "one result of max, kept": (lambda x: x.max(-1, keepdim=True)[1], 1),
    "two of one tensor": (lambda x: (x.argmax(-1), x.max(-1)[0]), 2),
    "in bfloat16": (lambda x: x.bfloat16().argmax(-1), 1),
    "of half precision": (lambda x: x.half().max(-1)[1], 1),
    "of rows of rows": (lambda x: x.view(-1, 1, V).argmax(-1), 1),
    "of short rows": (lambda x: x[:, : V - 1].argmax(-1), 0),
    "of another dim": (lambda x: x.view(-1, V, 1).argmax(1), 0),
    "of columns that lie apart": (lambda x: x.t().contiguous().t().argmax(-1), 0),
    "in float64": (lambda x: x.double().argmax(-1), 0),
    "of integers": (lambda x: (x * 100).int().max(-1)[1], 0),
    "the least": (lambda x: x.argmin(-1), 0),
}


@pytest.mark.parametrize("case", WHERE)
def test_where_it_matches_and_that_results_are_the_same(case: str, recorder_name: str, device: Any):
    chosen, matches = WHERE[case]

    def forward(params: Tensor, batch: toys.Batch) -> Any:
        return chosen(params[batch.token_ids])

    params = torch.randn(toys.V, V).to(device)
    options: Any = {"recorder": recorder_name, "modes": "FULL", "stage": "batch"}
    options |= {"sizes": toys.SIZES, "limits": toys.LIMITS}
    fast = fg.graphify(forward, passes=("row_max",), **options)
    assert [one.matches for one in fast.trace(params).passes] == [matches]
    step = fast.bind(params).capture(progress=False)
    for batch in (toys.on(toys.decode(2), device), toys.on(toys.batch(3, 4), device)):
        got, want = step(batch), forward(params, batch)
        for a, b in zip(tree_leaves(got), tree_leaves(want), strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b)


def test_a_row_of_as_many_columns_as_there_are_tokens_is_left():
    def forward(params: Tensor, batch: toys.Batch) -> Tensor:
        x = torch.where(batch.slot_mapping >= 0, params[batch.token_ids, 0], -torch.inf)
        return x.argmax(-1)

    fast = fg.graphify(
        forward, passes=("row_max",), stage="batch", sizes=toys.SIZES, limits=toys.LIMITS
    )
    assert [one.matches for one in fast.trace(torch.randn(toys.V, V)).passes] == [0]


def test_an_op_keeps_what_torch_asks_of_ops():
    x = torch.randn(3, 80)
    for given in ((x, False), (x, True), (x[0, 0], True)):
        torch.library.opcheck(OP.default, given, test_utils=("test_schema", "test_faketensor"))
    values, indices = OP(x, True)
    assert torch.equal(values, x.amax(-1, keepdim=True))
    assert torch.equal(indices, x.argmax(-1, keepdim=True))
    grad = torch.func.grad(lambda x: OP(x, False)[0].square().sum())(x)
    want = torch.zeros_like(x).scatter(1, indices, 2 * values)
    torch.testing.assert_close(grad, want)
    each = torch.vmap(lambda row: OP(row, False)[1])(x)
    assert torch.equal(each, x.argmax(-1))
