"""`python -m benchmarks ranks` apart from its processes: what is right, what is asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fngraph as fg
from benchmarks import ranks
from benchmarks.ranks.sharing import Right, Task, own_heads, part_of, rights
from benchmarks.ranks.stepping import faster, judged, prefill_rows
from benchmarks.ranks.streams import as_one
from benchmarks.ranks.ways import Made, by_hand

ALONE = fg.Mesh((fg.Axis("tp"),))
TINY = ranks.MODELS["tiny"]


@pytest.fixture(scope="module")
@torch.no_grad()
def found() -> tuple[Task, Right, Made]:
    task = Task(TINY, ALONE, part_of(TINY, ALONE), 32, (2,))
    ((_, made),) = by_hand(task, "captured", "folded heads", [2])
    return task, rights(task)[2], made


@torch.no_grad()
def test_a_step_by_hand_is_right(found: tuple[Task, Right, Made]) -> None:
    task, right, made = found
    assert 0 < judged(task, made, right)["error"] < 0.02


@torch.no_grad()
@pytest.mark.parametrize("what", ["logits", "kept"])
def test_what_is_wrong_has_no_figures(found: tuple[Task, Right, Made], what: str) -> None:
    task, right, made = found
    wrong: Any = (lambda: made.logits() * 1.2) if what == "logits" else (
        lambda: [x.roll(1, 0) for x in made.kept()]
    )  # fmt: skip
    with pytest.raises(ValueError, match="are off by"):
        judged(task, made._replace(**{what: wrong}), right)


@torch.no_grad()
def test_a_prefill_is_right() -> None:
    task = Task(TINY, ALONE, part_of(TINY, ALONE), 32, (1,), new=32)
    right = rights(task)[1]
    (row,) = prefill_rows(task, ["FULL-fused", "captured"], 1, right)
    assert row["tokens"] == 32 and row["error"] < 1e-5 and row["wall ms"] > 0
    (row,) = prefill_rows(task, ["FULL-fused"], 1, right._replace(logits=right.logits * 2))
    assert "are off by" in row["failed"]


def test_parts_are_of_one_whole() -> None:
    """Drawn by themselves, they are what `shard` cuts."""
    whole = part_of(TINY, ALONE)
    for size in (2, 4):
        for rank in range(size):
            axis = fg.Axis("tp", size, rank, "nobody's")
            own = part_of(TINY, fg.Mesh((axis,)))
            attn, of = own.layers[1].attn, whole.layers[1].attn
            heads = TINY.num_heads // size * TINY.head_dim
            assert torch.equal(attn.wq, of.wq[rank * heads : (rank + 1) * heads])
            assert torch.equal(attn.wo.weight, of.wo[:, rank * heads : (rank + 1) * heads])
            (head,) = own_heads(TINY, axis)
            assert head == rank * TINY.num_kv_heads // size
            rows = slice(head * TINY.head_dim, (head + 1) * TINY.head_dim)
            assert torch.equal(attn.wk, of.wk[rows])


def test_by_hand_is_compiled_in_the_form_that_was_faster(found: tuple[Task, Right, Made]) -> None:
    """By batch, by device time where there is one; a form that failed is not taken."""

    def row(form: str, batch: int, **more: Any) -> dict[str, Any]:
        return {"way": f"captured, {form}", "batch": batch, **more}

    rows = [
        row("enable_gqa", 1, **{"device ms": 1.0, "wall ms": 9.0}), row("enable_gqa", 4, failed=""),
        row("folded heads", 1, **{"device ms": 2.0, "wall ms": 3.0}),
        row("folded heads", 4, **{"device ms": None, "wall ms": 3.0}),
        {"way": "compile, folded heads", "batch": 1, "device ms": 0.1},
    ]  # fmt: skip
    task = found[0]._replace(batches=(1, 4))
    assert faster(task, rows) == {1: "enable_gqa", 4: "folded heads"}


def test_the_slowest_process_counts() -> None:
    rows = [[{"way": "a", "batch": 1, "ms": 1.0, "bound": None}],
            [{"way": "a", "batch": 1, "ms": 2.0, "bound": None, "failed": "why"}]]  # fmt: skip
    assert ranks.slowest(rows) == [
        {"way": "a", "batch": 1, "ms": 2.0, "bound": None, "failed": "why"}
    ]


def test_shares_of_a_stream_are_one_row() -> None:
    alone = as_one([{"new tokens": 8, "s": 2.0, "texts": {0: (1,), 1: (2,)}}], None)
    both = as_one([{"new tokens": 4, "s": 1.0, "texts": {0: (1,)}},
                   {"new tokens": 4, "s": 1.25, "texts": {1: (3,)}}], alone)  # fmt: skip
    assert (both["tokens/s"], both["of one"], both["texts as of one"]) == (6.4, 1.6, 0.5)


def step(processes: int, way: str, ms: float, layers: int = 32) -> dict[str, Any]:
    """A row."""
    return {"model": "8B", "layers": layers, "processes": processes, "way": way, "batch": 1,
            "device ms": ms}  # fmt: skip


def test_what_is_asked_of_gpus() -> None:
    flags: Any = SimpleNamespace(device="cuda")
    slow = [step(1, "FULL-fused", 3.6), step(2, "FULL-fused", 2.5), step(2, "captured", 2.6)]
    fast = [step(1, "FULL-fused", 3.6), step(2, "FULL-fused", 2.2), step(2, "captured", 2.6)]
    told = "\n".join(ranks.missed({"step": slow}, flags))
    assert "2.50 ms, and at most 2.4" in told and "1.04 times as fast as the others" in told
    assert not ranks.missed({"step": fast}, flags)
    assert not ranks.missed({"step": [row | {"layers": 4} for row in slow]}, flags)
    more = {
        "agreement": [{"model": "8B", "processes": 2, "exchange us": 41.0}],
        "stream": [{"model": "8B", "processes": 1}, {"model": "8B", "processes": 2, "of one": 1.8}],
        "memory": [{"model": "8B", "processes": 2, "of part": 1.2}],
    }
    assert len(ranks.missed(more, flags)) == 3
    assert not ranks.missed(more, SimpleNamespace(device="cpu"))  # type: ignore[arg-type]
    failed = {"step": [step(2, "compile", 1.0) | {"failed": "why"}]}
    assert ranks.missed(failed, SimpleNamespace(device="cpu"))  # type: ignore[arg-type]
