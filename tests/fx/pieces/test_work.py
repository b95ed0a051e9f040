"""What pieces and cuts are said to do, beside what they do."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from typing import Any

import pytest
import torch
import toys
from torch.utils.flop_counter import FlopCounterMode

import fngraph as fg
from fngraph.core import Work
from fngraph.errors import SpecError
from fngraph.fx.pieces.work import _seen
from fngraph.models.families import llama

CONFIG = llama.Config(
    vocab_size=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, dim=32, mlp_dim=64
)
LIMITS = fg.Limits(max_tokens=16, max_reqs=8, B=4)


@fg.struct
class Rows:
    x: torch.Tensor = fg.buffer("T 8", "float32")
    ids: torch.Tensor = fg.buffer("T", "int64", min=0)
    spec: fg.BatchSpec = fg.host()


@fg.struct
class States:
    x: torch.Tensor = fg.buffer("T 6", "float32")
    state_slots: torch.Tensor = fg.buffer("R", "int64", pad=-1)
    seq_lens: torch.Tensor = fg.buffer("R", "int32", pad=0)
    query_start_loc: torch.Tensor = fg.buffer("R + 1", "int32", pad="stride")
    spec: fg.BatchSpec = fg.host()


@functools.cache
def lowered(**options: Any) -> Any:
    """Of a small Llama."""
    fast = fg.graphify(
        llama.forward, donate="cache", stage="batch", recorder="tape", sizes=(6,), **options
    )
    params, cache = llama.init_params(CONFIG, seed=0), llama.init_cache(CONFIG, 32, block_size=4)
    return fast.trace(params, cache, limits=LIMITS).split().lower(), params, cache


def works(low: Any, T: int, R: int, longest: int | None = 9) -> list[Work]:
    """All that is done."""
    sizes = {"B": 4, "T": T, "R": R}
    parts = low.executable(()).count(sizes, sizes, longest)
    return [work for part in parts for work in part.works]


def batch_of(T: int, R: int) -> llama.Batch:
    starts = [*range(0, R), T]  # one token each, and the rest for the last
    lens = torch.tensor([b - a for a, b in itertools.pairwise(starts)], dtype=torch.int32)
    return llama.Batch(
        token_ids=torch.arange(T), positions=torch.zeros(T, dtype=torch.int64),
        slot_mapping=torch.full((T,), -1), seq_lens=lens,
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        block_tables=torch.zeros(R, 4, dtype=torch.int32),
        logits_indices=torch.tensor(starts[1:]) - 1, spec=fg.BatchSpec(T, R),
    )  # fmt: skip


@pytest.mark.parametrize("T, R", [(6, 6), (6, 2), (1, 1)])
def test_flops_of_products_are_those_that_torch_counts(T: int, R: int):
    low, params, cache = lowered(modes="NONE")
    products = [w for w in works(low, T, R) if w.kind == "product"]
    counted = FlopCounterMode(display=False)
    with counted, torch.no_grad():
        llama.forward(params, cache, batch_of(T, R))
    by_op = counted.get_flop_counts()["Global"]
    assert sum(w.flops for w in products) == by_op[torch.ops.aten.mm]
    for work in products:
        rows, columns, depth = work.shape
        assert work.flops == 2 * rows * columns * depth
        assert work.nbytes == 4 * (rows * columns + rows * depth + columns * depth)
    assert [w.shape[0] for w in products] == [T] * (7 * 2) + [R]  # the head is for R rows


def test_an_op_is_a_node_of_the_graphs_and_a_view_is_none():
    low, params, cache = lowered(modes="PIECEWISE")
    step = low.compile().capture(params, cache)
    (key,) = step
    parts = low.executable(()).count({"B": 4, "T": 6, "R": 6}, {"B": 4, "T": 6, "R": 6}, 9)
    ours = [sum(w.kernels for w in part.works) for part in parts if not part.cut]
    unpack_and_results = [1, *[0] * (len(ours) - 2), 1]
    graphs = [counts.nodes for counts in step[key].graph_counts]
    assert [a + b for a, b in zip(ours, unpack_and_results, strict=True)] == graphs


def test_kinds_and_bytes_of_what_is_no_product():
    def forward(params, batch: Rows):
        found = params["table"][batch.ids]  # (T, 8)
        left, right = (found + batch.x).split(4, -1)
        scaled = left * params["scale"]
        return torch.cat([scaled, right.to(torch.bfloat16).float()], -1).view(-1, 2, 4).sum(-1)

    params = {"table": torch.zeros(100, 8), "scale": torch.ones(4)}
    fast = fg.graphify(forward, modes="FULL", stage="batch", sizes=(4,), limits=fg.Limits(4, 2))
    low = fast.trace(params).split().lower()
    (part,) = low.executable(()).count({"T": 3, "R": 1}, {"T": 3, "R": 1}, None)
    told = [(w.kind, w.nbytes) for w in part.works if w.kernels]
    row = 3 * 8 * 4
    assert told == [
        ("index", 2 * row + 3 * 8),  # what it finds, and where; not the table
        ("pointwise", 3 * row),
        ("broadcast 4", row / 2 * 2 + 16),  # a half of each row is not dense; the scale counts once
        ("broadcast 2", row / 2 + row / 4),
        ("pointwise", row / 4 + row / 2),
        ("cat", 2 * row),
        ("reduction", row + 3 * 2 * 4),
    ]
    views = [w for w in part.works if not w.kernels]
    assert views and {w.kind for w in views} == {"view"}
    assert all(w.nbytes == 0 for w in views)


def test_an_element_that_stands_for_several_is_read_once():
    def forward(params, batch: Rows):
        return batch.x * batch.x[:, :1].expand(-1, 8)

    fast = fg.graphify(forward, modes="NONE", stage="batch", limits=fg.Limits(4, 2))
    low = fast.trace({}).split().lower()
    (part,) = low.executable(()).count({"T": 3, "R": 1}, {"T": 3, "R": 1}, None)
    (work,) = (w for w in part.works if w.kernels)
    assert work.nbytes == 3 * 8 * 4 * 2 + 3 * 4


def test_cuts_run_on_true_rows_and_pieces_on_padded_ones():
    low, *_ = lowered(modes="PIECEWISE")
    count, true, padded = (
        low.executable(()).count,
        {"B": 4, "T": 5, "R": 5},
        {"B": 4, "T": 6, "R": 6},
    )
    mixed, all_true, all_padded = (
        count(*sizes, 9) for sizes in ((padded, true), (true, true), (padded, padded))
    )
    for found, small, large in zip(mixed, all_true, all_padded, strict=True):
        assert found == (small if found.cut else large) and small != large


def test_passes_make_fewer_kernels_of_the_same_flops():
    plain, fused = (
        works(lowered(modes="NONE", passes=passes)[0], 6, 6) for passes in (None, "all")
    )
    assert sum(w.kernels for w in fused) < sum(w.kernels for w in plain) / 2
    assert sum(w.flops for w in fused) == sum(w.flops for w in plain)
    assert "product" in Counter(w.kind for w in fused)


# --- attention ------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 3, 9])
def test_scores_are_those_that_a_mask_keeps(causal: bool, window: int | None):
    for brought, has in itertools.product(range(1, 7), range(1, 9)):
        if brought > has:
            continue
        query = torch.arange(has - brought, has)[:, None]
        key = torch.arange(has)
        keeps = torch.ones(brought, has, dtype=torch.bool)
        if causal:
            keeps &= key <= query
        if window is not None:
            keeps &= (query - key).abs() < window if not causal else query - key < window
        scores, keys = _seen(brought, has, causal, window)
        assert keys == keeps.any(0).sum()
        exact = keeps.sum().item()
        if causal or window is None:
            assert scores == exact
        else:
            assert exact <= scores  # of a window in both directions at most


@pytest.mark.parametrize("T, R, longest", [(6, 6, 9), (8, 2, 30), (16, 1, 16)])
def test_attention_reads_each_request_once_and_computes_what_is_not_masked(T, R, longest):
    low, *_ = lowered(modes="NONE")
    attention = [w for w in works(low, T, R, longest) if "attention" in w.kind]
    assert len(attention) == 2
    for work in attention:
        q = T // R
        scores = sum(longest - q + 1 + i for i in range(q))
        assert work.flops == 4 * R * 4 * 8 * scores  # 4 heads of 8
        pages = R * longest * 2 * 2 * 8 * 4  # k and v of 2 heads of 8, in float32
        assert work.nbytes == pages + T * (2 * 4 * 8 + 4 * 2 * 8) * 4
        assert work.kind == "decode attention" and work.called == "attention"


def test_a_chunk_of_many_tokens_goes_by_flops():
    low, *_ = lowered(modes="NONE")
    (work, _) = (w for w in works(low, 17, 1, 17) if "attention" in w.kind)
    assert work.kind == "prefill attention 8"


def test_how_long_requests_are_has_to_be_said():
    low, *_ = lowered(modes="NONE")
    spec = fg.BatchSpec(4, 4, query_len=1)
    with pytest.raises(SpecError, match="context=512"):
        low.launch_model(toys.CONSTANTS).predict(spec)
    said = spec._replace(host=fg.HostBounds(max_seq_len=9))
    found = low.launch_model(toys.CONSTANTS, context=9).predict(spec)
    assert found == low.launch_model(toys.CONSTANTS).predict(said) and found.wall_us > 0


def test_a_step_predicts_as_what_it_was_made_of():
    low, params, cache = lowered(modes="PIECEWISE")
    step = low.compile().capture(params, cache)
    spec = fg.BatchSpec(5, 5)
    found = step.launch_model(toys.CONSTANTS, 9).predict(spec)
    assert found == low.launch_model(toys.CONSTANTS, 9).predict(spec)
    assert found.launches == 5 and math.isfinite(found.wall_us)


def test_what_is_compiled_is_told_to_be_counted_as_traced():
    low, *_ = lowered(modes="NONE", compile="pieces")
    (note,) = low.launch_model(toys.CONSTANTS, 9).notes
    assert "counted op by op" in note
    assert note in low.launch_model(toys.CONSTANTS, 9).as_text((1,))


def test_a_primitive_without_a_formula_goes_by_its_rows_and_the_states_of_its_requests():
    def forward(params, state, batch: States):
        return fg.ops.causal_conv(batch.x, params, state, batch)

    fast = fg.graphify(forward, modes="NONE", donate="state", stage="batch")
    low = fast.trace(torch.zeros(6, 4), torch.zeros(50, 6, 3), limits=LIMITS).split().lower()
    count = low.executable(()).count
    (cut,) = (part for part in count({"T": 5, "R": 2}, {"T": 5, "R": 2}, None) if part.cut)
    rows, state, told = 2 * 5 * 6 * 4, 2 * 2 * 6 * 3 * 4, 2 * 8 + 2 * 4 + 3 * 4
    assert cut.works == (Work("causal_conv", rows + state + told + 6 * 4 * 4, 0.0, 1, "float32",
                              None, "causal_conv"),)  # fmt: skip
