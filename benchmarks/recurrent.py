"""Recurrent kernels against the device's copy and the reference: python -m benchmarks recurrent

Gated delta rule in Qwen3-Next's shape (16 key heads, 32 value heads, 128 by 128), state space in a
Mamba-2 shape (64 heads of 64, state 128, 1 group), bf16 tokens, float32 states, a convolution of
8192 channels and 4 taps. Decode: TB/s of states read and written. Prefill: ms of whole
prompts, the reference's in the same run. Times are of replayed graphs, medians; the reference's
prefill, thousands of launches, is timed eagerly, once. Every result is compared with the
reference's.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

import fngraph as fg
from benchmarks.device import (
    PREFILLS,
    copy_bandwidth,
    device_us,
    draw,
    error_of,
    once_ms,
    starts_of,
)
from benchmarks.harness import Benchmark, kept, show

BATCHES = [*itertools.product((1, 8, 32, 128), (1,)), (32, 4)]  # (requests, query length)
NAMES = ("gated_delta", "ssd", "causal_conv")
ops: Any = fg.ops


class Batch(NamedTuple):
    """One call's arguments, in their order but for the output."""

    name: str
    args: tuple[Tensor, ...]
    state: Tensor
    meta: Any
    like: Tensor
    rest: tuple[float, ...] = ()

    def call(self, backend: str, query_len: int, state: Tensor) -> Tensor:
        """One run over `state`, into a new output."""
        known, out = ops.primitive(self.name), torch.empty_like(self.like)
        args = (*self.args, state, *self.meta, out, *self.rest)
        host = fg.HostBounds(max_query_len=query_len)
        known.call(known.backend(backend), args, known.configure(*args), host)
        return out


def batch(name: str, new: tuple[int, ...], past: int) -> Batch:
    """Requests of `new` tokens each, all with as long a past."""
    T, R = sum(new), len(new)
    starts = starts_of(new)
    lens = starts.diff() + past
    meta = ops.StateMeta(torch.randperm(R, device="cuda"), lens, starts)
    if name == "gated_delta":
        q, k = (normalize(draw(T, 16, 128).abs(), dim=-1) for _ in range(2))
        v, g, beta = draw(T, 32, 128), -draw(T, 32).float().abs(), draw(T, 32).sigmoid()
        state = draw(R, 32, 128, 128).float()
        return Batch(name, (q, k, v, g, beta), state, meta, v, (128**-0.5,))
    if name == "ssd":
        x, dt, a = draw(T, 64, 64), softplus(draw(T, 64).float()), -draw(64).float().abs()
        b, c = (draw(T, 1, 128).abs() for _ in range(2))
        return Batch(name, (x, dt, a, b, c), draw(R, 64, 64, 128).float(), meta, x)
    x = draw(T, 8192)
    return Batch(name, (x, draw(8192, 4)), draw(R, 8192, 3), meta, x)


def compared(b: Batch, query_len: int) -> float:
    """The largest error of a row or of a state, by its own norm."""
    mine, theirs = b.state.clone(), b.state.clone()
    got, want = b.call("triton", query_len, mine), b.call("reference", query_len, theirs)
    what = f"{b.name} of {b.meta.query_start_loc.tolist()}"
    of_states = error_of(mine.flatten(2), theirs.flatten(2), f"the state of {what}")
    return max(error_of(got, want, what), of_states)


def decode(name: str, n: int, query_len: int, peak: float) -> dict[str, Any]:
    """One point: us of each backend, TB/s of the state, its share of the copy bandwidth."""
    b = batch(name, (query_len,) * n, 100)
    error = compared(b, query_len)
    us = {
        backend: device_us(lambda backend=backend: b.call(backend, query_len, b.state))  # type: ignore[misc]
        for backend in ("triton", "reference")
    }
    moved = 2 * b.state.nbytes / us["triton"] / 1e6
    return {
        "primitive": name, "batch": n, "query_len": query_len, **us,
        "ratio": us["reference"] / us["triton"], "TB/s": moved, "share of copy": moved / peak,
        "error": error,
    }  # fmt: skip


def prefill(name: str, new: tuple[int, ...]) -> dict[str, Any]:
    """Whole prompts: ms of each backend."""
    b = batch(name, new, 0)
    error = compared(b, max(new))
    ours = device_us(lambda: b.call("triton", max(new), b.state)) / 1e3
    theirs = once_ms(lambda: b.call("reference", max(new), b.state))
    return {
        "primitive": name, "prompts": new, "triton ms": ours, "reference ms": theirs,
        "ratio": theirs / ours, "M tokens/s": sum(new) / ours / 1e3, "error": error,
    }  # fmt: skip


@Benchmark(needs_cuda=True)
def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """Decode and prefill of each primitive."""
    torch.manual_seed(0)
    peak = copy_bandwidth()
    most = 1 if flags.quick else None
    figures: dict[str, Any] = {"copy TB/s": peak}
    decodes = (decode(name, n, q, peak) for name in NAMES for n, q in BATCHES[:most])
    show(kept(flags, decodes, figures, "decode"), "decode, us a call")
    prefills = (prefill(name, new) for name in NAMES for new in PREFILLS[:most])
    show(kept(flags, prefills, figures, "prefill"), "prefill")
    return figures
