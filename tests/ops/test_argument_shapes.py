"""What a primitive's arguments look like: the one that does not fit is named, with what does."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import toys
from torch import Tensor

import fngraph as fg
from fngraph.errors import TreeError
from fngraph.ops import AttentionMeta, StateMeta
from fngraph.ops.check_shapes import Shapes
from fngraph.testing.cases import case

INT = torch.int32
T, R, H, K, D = 5, 3, 4, 2, 8  # two requests and a padding one: other numbers than H and K


def ints(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=INT)


class Given:
    """The fields of any of the metas."""

    def __init__(self, **fields: Any) -> None:
        self.slot_mapping, self.state_slots = (
            torch.tensor([0, 1, 2, 8, -1]),
            torch.tensor([0, 1, 2]),
        )
        self.seq_lens, self.query_start_loc = ints(3, 1, 0), ints(0, 3, 4, 4)
        self.block_tables, self.prefix_len = ints([0, 1], [2, 3], [0, 0]), ints(0)
        vars(self).update(fields)


def call(name: str, **wrong: Any) -> Any:
    """The primitive over arguments that fit, but for those in `wrong`."""
    batch = Given(**{k: wrong.pop(k) for k in list(wrong) if hasattr(Given(), k)})
    z = torch.zeros
    heads = {"q": z(T, H, D), "k": z(T, K, D), "v": z(T, K, D)}
    heads["kv"] = (z(6, 4, K, D), z(6, 4, K, D))  # type: ignore[assignment]
    given: dict[str, dict[str, Any]] = {
        "attention": heads,
        "cascade": heads,
        "mla": {"q": z(T, H, 12), "new": z(T, 12), "cache": z(6, 4, 12)},
        "gated_delta": {
            "q": z(T, K, D), "k": z(T, K, D), "v": z(T, H, 6), "g": z(T, H), "beta": z(T, H),
            "state": z(7, H, D, 6),
        },
        "ssd": {
            "x": z(T, H, 6), "dt": z(T, H), "a": z(H), "b": z(T, K, D), "c": z(T, K, D),
            "state": z(7, H, 6, D),
        },
        "causal_conv": {"x": z(T, 9), "weight": z(9, 4), "state": z(7, 9, 3)},
    }  # fmt: skip
    args = {key: wrong.pop(key, x) for key, x in given[name].items()}
    more = {"rank": 8, "scale": 0.3} if name == "mla" else {}
    return getattr(fg.ops, name)(*args.values(), batch, **more | wrong)


z = torch.zeros
PAGED = [
    ({"slot_mapping": z(3).long()}, "slot_mapping", "(T,) with T = 5"),
    ({"seq_lens": z(3)}, "seq_lens", "int32 or int64 tensor of (R,)"),
    ({"seq_lens": [3, 1, 0]}, "seq_lens", "(R,)"),
    ({"seq_lens": ints(3)[0]}, "seq_lens", "(R,)"),
    ({"query_start_loc": ints(3, 4, 4)}, "query_start_loc", "(R + 1,) with R = 3"),
    ({"block_tables": ints(0, 1, 2)}, "block_tables", "(R, B) with R = 3"),
    ({"block_tables": ints([0, 1])}, "block_tables", "(R, B) with R = 3"),
]
HEADS = [
    ({"q": z(T, H * D)}, "q_THD", "(T, H, D)"),
    ({"q": z(T, 3, D)}, "H=3", "multiple of K=2"),
    ({"k": z(T, 0, D), "v": z(T, 0, D), "kv": (z(6, 4, 0, D),) * 2}, "H=4", "multiple of K=0"),
    ({"k": z(T, K, D + 1)}, "k_TKD", "D = 8"),
    ({"v": z(T - 1, K, D)}, "v_TKD", "T = 5"),
    ({"kv": z(2, 6, 4, K, D)}, "kv", "kv=(k_cache, v_cache)"),
    ({"kv": (z(6, 4, K, D),)}, "kv", "kv=(k_cache, v_cache)"),
    ({"kv": (z(6, 4, K, D), z(6, 4, K, D).half())}, "kv", "one dtype"),
    ({"kv": (z(6, 4, K * D), z(6, 4, K * D))}, "kv[0]", "(num_blocks, block_size, K, D)"),
    ({"kv": (z(6, 4, K, D), z(3, 4, K, D))}, "kv[1]", "num_blocks = 6"),
    ({"scale": torch.ones(())}, "scale", "float"),
]
STATES = [
    ({"state_slots": z(2).long()}, "seq_lens", "R = 2"),
    ({"state_slots": z(3)}, "state_slots", "int32 or int64"),
    ({"query_start_loc": ints(3, 4, 4)}, "query_start_loc", "(R + 1,) with R = 3"),
]
WRONG = {
    "attention": [
        *PAGED,
        *HEADS,
        ({"sinks": z(K)}, "sinks", "(H,) with H = 4"),
        ({"k_scale": 2.0}, "k_scale", "(K,) with K = 2"),
        ({"v_scale": z(H)}, "v_scale", "(K,) with K = 2"),
        ({"window": 2.5}, "window", "int"),
        ({"window": True}, "window", "int"),
        ({"softcap": "3"}, "softcap", "float"),
    ],
    "cascade": [*PAGED, *HEADS, ({"prefix_len": ints(0, 0)}, "prefix_len", "(1,)")],
    "mla": [
        *PAGED,
        ({"q": z(T, H, 11)}, "new_TC", "C = 11"),
        ({"new": z(T, 1, 12)}, "new_TC", "(T, C)"),
        ({"cache": z(6, 4, 1, 12)}, "cache", "(num_blocks, block_size, C)"),
        ({"rank": 8.0}, "rank", "int"),
    ],
    "gated_delta": [
        *STATES,
        ({"v": z(T, 3, 6), "g": z(T, 3), "beta": z(T, 3), "state": z(7, 3, D, 6)},
         "H=3", "multiple of G=2"),
        ({"beta": z(T, K)}, "beta_TH", "H = 4"),
        ({"state": z(7, H, 6, D)}, "state", "(num_slots, H, D, V)"),
    ],
    "ssd": [
        *STATES,
        ({"a": z(T, H)}, "a_H", "(H,) with H = 4"),
        ({"c": z(T, K, D + 1)}, "c_TGN", "N = 8"),
        ({"state": z(7, H, D, 6)}, "state", "(num_slots, H, P, N)"),
    ],
    "causal_conv": [
        *STATES,
        ({"weight": z(4, 9)}, "weight_CW", "(C, W) with C = 9"),
        ({"state": z(7, 9, 4)}, "state", "(num_slots, C, W - 1)"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_fits_runs(name):
    call(name)


@pytest.mark.parametrize(
    "name, wrong, named, expected",
    [
        pytest.param(name, *row, id=f"{name}-{row[1]}-{i}")
        for name, rows in WRONG.items()
        for i, row in enumerate(rows)
    ],
)
def test_the_argument_that_does_not_fit_is_named_with_what_does(name, wrong, named, expected):
    call(name)  # what fits is remembered
    with pytest.raises(TreeError) as raised:
        call(name, **wrong)
    text = str(raised.value)
    start = rf"test_argument_shapes.py:\d+: fg.ops.{name}: (batch\.)?{re.escape(named)}( is |=)"
    assert re.search(start, text) and expected in text, text


def test_a_rank_beyond_the_columns():
    with pytest.raises(ValueError, match=r"rank=13.*1 to 12"):
        call("mla", rank=13)


def test_scales_are_one_number_or_one_a_head():
    for scale in (torch.tensor(2.0), torch.tensor([2.0, 3.0])):
        call("attention", k_scale=scale, v_scale=scale)
    for _ in range(2):
        with pytest.raises(TreeError, match="k_scale"):
            call("attention", k_scale=torch.ones(K + 1))


def test_what_is_remembered_of_one_call_is_not_another_calls():
    shapes = Shapes("f", {"x": "T H"})
    for Z in (3, 4):
        sizes = shapes.check(torch.zeros(T, H))
        assert sizes == {"1": 1, "T": T, "H": H}
        shapes.also("y", "T Z", torch.zeros(T, Z), sizes)


@pytest.mark.parametrize("modes", ["FULL", "PIECEWISE"])
def test_a_trace_is_asked_nothing_about_tokens_and_requests(modes):
    fast = fg.graphify(toys.attend, modes=modes, donate="cache", stage="batch", sizes=toys.SIZES)
    traced = fast.trace(toys.attention_params(), toys.attention_cache(), limits=toys.LIMITS)
    assert not traced.graph.assumptions


def test_a_trace_names_the_argument_too():
    def forward(params: Any, cache: Any, batch: toys.Batch) -> Any:
        x = params["embed"][batch.token_ids].unflatten(-1, (toys.H, -1))
        return fg.ops.attention(x, x, x, cache[0], batch, sinks=params["embed"][0])

    fast = fg.graphify(forward, donate="cache", stage="batch")
    with pytest.raises(TreeError, match=r"fg\.ops\.attention: .* is .*, expected a"):
        fast.trace(toys.attention_params(), toys.attention_cache(), limits=toys.LIMITS)


def test_metas_have_the_fields_that_are_checked():
    assert {f"batch.{x}" for x in AttentionMeta._fields} == set(fg.ops.check_shapes.PAGED)
    assert {f"batch.{x}" for x in StateMeta._fields} == set(fg.ops.check_shapes.STATES)
    assert case((3, 5)).run().shape == (3, 4, 8)
