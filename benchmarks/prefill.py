"""A prompt's chunk in every way that there is: python -m benchmarks prefill

One request, whose first tokens run in one step: --chunk of them, over an empty cache. Random
weights; logits of the last token, and its k and v, are held to float32's. All ways of a chunk take
turns, by the clocks of `decode`. `share` is of --peak, of the operations that a chunk needs:
products of all its tokens, of the head for the last alone, and attention to tokens not behind.

PIECEWISE-none ...  fngraph: what serves prompts, and NONE and FULL, at levels none, fused, pieces
bare                `forward`, called
eager ...           decode/plain.py's step with causal SDPA: called, captured by hand, under
                    `torch.compile` in two modes and captured by hand
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from benchmarks.decode import ours, peers, plain
from benchmarks.decode.bench import Bench, Made, Right, make_bench
from benchmarks.decode.judging import broken
from benchmarks.decode.measuring import Point, all_rows, in_turns, start_anew
from benchmarks.decode.models import MODELS
from benchmarks.device import release
from benchmarks.harness import BACKEND, DEVICE, ENDS, Benchmark, count, ends_of, some_of
from benchmarks.workload import BLOCK_SIZE

PEAK = 790  # TFLOP/s of large bfloat16 products on an H200, as measured
Run = Callable[..., tuple[Tensor, Tensor]]


def repeated_heads(q_RHTD: Tensor, k_RKSD: Tensor, v_RKSD: Tensor, _: Any) -> Tensor:
    """Causal SDPA in a form that needs no memory for all scores in float32 either."""
    more = q_RHTD.shape[1] // k_RKSD.shape[1]
    k, v = (x.repeat_interleave(more, 1) for x in (k_RKSD, v_RKSD))
    return torch.nn.functional.scaled_dot_product_attention(q_RHTD, k, v, is_causal=True)


def first_chunk(
    config: Any, weights: plain.Weights, cache: Any, ids_RT: Tensor, positions_RT: Tensor
) -> tuple[Tensor, Tensor]:
    """The next token, (R,), and logits, (R, V)."""
    logits_RV = plain.chunk_step(
        config, weights, cache, ids_RT, positions_RT, plain.causal_heads
    )  # fmt: skip
    return logits_RV.argmax(-1), logits_RV


def by_hand(compiled: dict[str, Any] | None, in_graph: bool) -> Callable[[Bench, Right], Made]:
    """The plain step over one chunk, compiled with these options if there are any."""

    def make(bench: Bench, right: Right) -> Made:
        weights, cache = plain.weights_of(bench.params), bench.contiguous(1)
        ids_RT = right.ids[None]
        positions_RT = torch.arange(bench.new, device=bench.device)[None]
        fn: Run = first_chunk
        if compiled is not None:
            fn = torch.compile(first_chunk, fullgraph=True, dynamic=False, **compiled)
        last: list[Any] = []

        def once() -> None:
            last[:] = fn(bench.config, weights, cache, ids_RT, positions_RT)

        replay = peers.captured(once, right.ids.device) if in_graph else once

        def step(_: Any) -> Tensor:
            replay()
            next_R: Tensor = last[0]
            return next_R

        views = [(k.transpose(1, 2), v.transpose(1, 2)) for k, v in cache]
        more = {"attention": "SDPA, causal"}
        return Made(step, lambda: last[1], lambda: views, bench.wait, more=more)

    return make


def by_us(way: str) -> Callable[[Bench, Right], Made]:
    """One of fngraph's, over the same tokens in each step."""

    def make(bench: Bench, right: Right) -> Made:
        made = ours.WAYS[way](bench)(1)
        return dataclasses.replace(made, step=lambda _: made.step(right.ids))

    return make


PEERS = {
    "eager": by_hand(None, False),
    "captured": by_hand(None, True),
    "compile": by_hand({}, True),
    "max-autotune": by_hand({"mode": "max-autotune-no-cudagraphs"}, True),
}
WAYS = {way: by_us(way) for way in ours.WAYS} | PEERS


def operations(config: Any, weights: plain.Weights, tokens: int) -> float:
    """Of a chunk, a dense model's: two for each weight and token, and attention's."""
    each = 0.0
    for layer in weights.layers:
        each += layer.wqkv.numel() + layer.wo.numel()
        each += sum(x.numel() for x in layer.mlp)
    scores = tokens * (tokens + 1) / 2 * config.num_heads * config.head_dim * config.num_layers
    return 2 * (each * tokens + weights.head.numel()) + 4 * scores


def rows_of(
    flags: argparse.Namespace, model: str, bench: Bench, ends: float
) -> Iterator[dict[str, Any]]:
    """A row a way, of one chunk."""
    start_anew()
    ids = bench.ids(1, torch.Generator().manual_seed(0))
    right, _ = bench.reference(ids, torch.float32, repeated_heads)
    needed = operations(bench.config, plain.weights_of(bench.params), bench.new)
    make = lambda way: WAYS[way](bench, right)  # noqa: E731

    def rates(row: dict[str, Any]) -> dict[str, Any]:
        rate = needed / row["device ms"] / 1e9
        return {"TFLOP/s": rate, "share": rate / flags.peak}

    for row in in_turns(flags, make, bench, right, ends, rates):
        yield {"model": model, "way": row["way"], "chunk": bench.new, **row}


def missed(rows: list[dict[str, Any]], flags: argparse.Namespace) -> list[str]:
    """A way that failed; and where our best is behind the best of others."""
    lines = [
        f"{row['model']}, chunk of {row['chunk']}, {row['way']}: {row['failed']}"
        for row in rows
        if broken(row, PEERS)
    ]
    if not flags.device.startswith("cuda"):
        return lines
    for model, chunk in dict.fromkeys((row["model"], row["chunk"]) for row in rows):
        here = [
            row for row in rows if (row["model"], row["chunk"]) == (model, chunk) and "share" in row
        ]
        by_share = lambda row: row["share"]  # noqa: E731
        mine = max((r for r in here if r["way"] in ours.WAYS), key=by_share, default=None)
        other = max((r for r in here if r["way"] in PEERS), key=by_share, default=None)
        if mine and other and mine["share"] < other["share"]:
            lines.append(
                f"{model}, chunk of {chunk}: {mine['way']} at {mine['share']:.0%} of the peak, "
                f"{other['way']} at {other['share']:.0%}"
            )
    return lines


DENSE = [name for name, model in MODELS.items() if not hasattr(model.config, "num_experts")]


@Benchmark(
    {
        **DEVICE, **BACKEND, "--models": some_of(DENSE, ["1B", "8B"]),
        "--chunk": count([512, 1024, 2048, 4096, 8192], "tokens", multiple_of=BLOCK_SIZE),
        "--ways": some_of(list(WAYS)), "--repeats": count(40, "steps of each clock"),
        "--peak": count(PEAK, "TFLOP/s of large products"),
        **ENDS,
    },
    quick={
        "models": ["tiny"], "chunk": [32], "repeats": 2,
        "ways": ["PIECEWISE-none", "bare", "eager", "captured"],
    },
    missed=missed,
)  # fmt: skip
@torch.no_grad()
def measure(flags: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a model, chunk and way, kept as they come."""
    return all_rows(flags, points(flags))


def points(flags: argparse.Namespace) -> Iterator[Point]:
    """Each model and chunk, with its rows."""
    ends = ends_of(flags)
    for model in flags.models:
        whole = make_bench(model, max(flags.chunk), [1], flags.device, flags.backend)
        for chunk in flags.chunk:
            bench = dataclasses.replace(whole, context=chunk, new=chunk)
            yield f"{model}, chunk of {chunk}", rows_of(flags, model, bench, ends)
        del whole, bench
        release(flags.device)
