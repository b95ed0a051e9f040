"""Triton backends of the gated delta rule and the state space: two recurrences, the same kernels.

A request of up to SHORT tokens goes token by token (see `token`), a longer one chunk by chunk,
by matrix products, whatever batch it comes in: its bits depend on itself alone. The grids depend on
T and R alone, and a batch that is known to hold short requests only (decode, verifying drafts) is
one launch.

Chunks of 64 tokens begin at a request's own first token of the step. With L_ij the decay between
tokens j and i of a chunk, S the state before it, and g_i the decay from there:

    (I + A) u = rate (v - g k S),  A_ij = rate_i L_ij k_i k_j  for j < i  (state space: u = rate v)
    o = g q S + P u,               P_ij = L_ij q_i k_j         for j <= i

`chunk_kernel` makes P and (I + A)^-1 of all chunks at once, `scan_kernel` goes through a request's
chunks in order. Decays are sums of the segment's own logarithms, never differences of sums from
afar, which would cancel.

Source: Yang, Wang, Zhang, Shen and Kim, "Parallelizing Linear Transformers with the Delta Rule",
2024, section 3.2, and Dao and Gu, "Transformers are SSMs", 2024, section 6. Ours keeps the inverse,
and applies it to what is left of v after the state.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fngraph.core import HostBounds
from fngraph.ops.paged.config import dense
from fngraph.ops.recurrent.delta_rule import GatedDeltaArgs
from fngraph.ops.recurrent.requests import is_empty
from fngraph.ops.recurrent.state_space import SSDArgs
from fngraph.ops.triton.launching import COUNTS, launch, power_of_two
from fngraph.ops.triton.recurrent.token import recurrent_kernel, request
from fngraph.ops.triton.repeating import Launches
from fngraph.ops.triton.tiling import find, lanes, tiles

SHORT = 8  # tokens that cost no more one by one than a chunk does
CHUNK, EXACT_CHUNK = 64, 16  # tokens; float32 goes without tensor cores, in small tiles
VALUES, EXACT_VALUES = 32, 16  # of a head, a program: its tile of the state has them by all keys


def gated_delta(
    args: GatedDeltaArgs, host: HostBounds | None, kept: Launches | None = None
) -> None:
    """See `fngraph.ops.gated_delta`; shape letters are listed there."""
    tokens = (args.q, args.k, args.v, args.beta, args.g)
    steps = args.state.stride()  # slots, heads, keys, values
    _launch_all(args, tokens, steps, args.config.scale, host, kept, delta=True)


def ssd(args: SSDArgs, host: HostBounds | None, kept: Launches | None = None) -> None:
    """See `fngraph.ops.ssd`; shape letters are listed there."""
    tokens = (args.c, args.b, args.x, args.dt, args.a)
    of_slot, of_head, of_value, of_key = args.state.stride()
    steps = (of_slot, of_head, of_key, of_value)
    _launch_all(args, tokens, steps, 1.0, host, kept, delta=False)


def _launch_all(
    args: GatedDeltaArgs | SSDArgs,
    tokens: tuple[Tensor, ...],
    steps: tuple[int, ...],
    scale: float,
    host: HostBounds | None,
    kept: Launches | None,
    *,
    delta: bool,
) -> None:
    """Launch what a batch needs; `tokens` are the kernels' q, k, v, rate and decay."""
    state, meta, out, config = args.state, args.meta, args.out, args.config
    q, k, v, rate, decay = map(dense, tokens)
    if is_empty(meta, args.out):
        args.out.zero_()
        return
    (T, H, V), (G, D), R = v.shape, k.shape[1:], meta.seq_lens.shape[0]
    longest = min(T, (host and host.max_query_len) or T)
    of_keys = (*q.stride()[:2], *k.stride()[:2])
    of_rates = (rate.stride(0), decay.stride(0) if delta else 0)
    of_out, where = out.stride()[:2], (meta.seq_lens, meta.query_start_loc)
    strides = (*of_keys, *v.stride()[:2], *of_rates, *steps, *of_out)
    exact, widest = config.dtype == torch.float32, power_of_two(V, at_least=16)
    constants: dict[str, Any] = {
        "DELTA": delta, "GROUP": H // G, "D": D, "DS": power_of_two(D, at_least=16), "V": V,
        "SHORT": SHORT, "kept": kept,
    }  # fmt: skip
    values = min(VALUES, widest)
    launch(
        recurrent_kernel,
        (-(-V // values), H, R),
        (q, k, v, rate, decay, meta.state_slots, *where),
        (state, out),
        (T, R, *strides, scale),
        VS=values,
        REST=longest <= SHORT,
        **constants,
    )
    if longest <= SHORT:
        return
    chunk, values = (EXACT_CHUNK, EXACT_VALUES) if exact else (CHUNK, min(VALUES, widest))
    constants |= {"C": chunk, "FLOAT32": exact or config.device == "cpu"}
    mixing = q.new_empty((T, H, chunk), dtype=torch.float32)
    inverse = torch.empty_like(mixing) if delta else mixing
    launch(
        chunk_kernel,
        (H, tiles(T, R, chunk)),
        (q, k, rate, decay, *where),
        (mixing, inverse, out) if delta else (mixing, mixing, out),
        (T, R, H, *of_keys, *of_rates, *of_out, scale),
        VS=widest,
        LEVELS=chunk.bit_length() - 1,
        REQS=lanes(R),
        **constants,
    )
    launch(
        scan_kernel,
        (-(-V // values), H, R),
        (q, k, v, rate, decay, meta.state_slots, *where, mixing, inverse),
        (state, out),
        (T, H, *strides, scale),
        VS=values,
        **constants,
    )


@triton.jit
def _dot(x, y, FLOAT32: tl.constexpr):
    """Float16 and bfloat16 are exact in tf32; what is computed from them is rounded to it."""
    if FLOAT32:
        product = tl.dot(x, y, input_precision="ieee")
    else:
        product = tl.dot(x, y, input_precision="tf32")
    return product


@triton.jit
def _rates(rate, decay, rate_row, decay_row, token, real, DELTA: tl.constexpr):
    """(rate, logarithm of the decay) of tokens; zero where none is."""
    by = tl.load(rate + token * rate_row, mask=real, other=0.0).to(tl.float32)
    g = tl.load(decay + token * decay_row, mask=real, other=0.0).to(tl.float32)
    return by, g if DELTA else g * by


@triton.jit(do_not_specialize=COUNTS)
def chunk_kernel(
    q, k, rate, decay, lens, starts, mixing, inverse, out, T, R, HEADS,
    q_row, q_head, k_row, k_head, rate_row, decay_row, out_row, out_head, scale,
    DELTA: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DS: tl.constexpr,
    V: tl.constexpr, VS: tl.constexpr, SHORT: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr,
    REQS: tl.constexpr, FLOAT32: tl.constexpr,
):  # fmt: skip
    """P, scaled, and with DELTA (I + A)^-1 of one chunk of one head, rows by token.

    Chunks are tiles of `tiles`. Rows past the last request are zeroed here, as are those of
    padding requests.
    """
    h, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    r, begin, first = find(starts, tile, R, C, REQS)
    end = T
    live = False
    if r < R:
        begin, end, live, _ = request(starts, lens, r, T)
    if (first < end) & ((r == R) | (end - begin > SHORT)):
        i = tl.arange(0, C)
        token = (first + i).to(tl.int64)
        real = token < end
        if live:
            d = tl.arange(0, DS)
            there = real[:, None] & (d < D)[None, :]
            key_head = h // GROUP
            q_at = token[:, None] * q_row + key_head * q_head + d[None, :]
            q_CD = tl.load(q + q_at, mask=there, other=0.0).to(tl.float32)
            k_at = token[:, None] * k_row + key_head * k_head + d[None, :]
            k_CD = tl.load(k + k_at, mask=there, other=0.0).to(tl.float32)
            by, g = _rates(rate + h, decay + h, rate_row, decay_row, token, real, DELTA)
            before = i[:, None] > i[None, :]
            between = tl.exp(tl.cumsum(tl.where(before, g[:, None], 0.0), 0))
            p = _dot(q_CD, tl.trans(k_CD), FLOAT32) * between * scale
            p = tl.where(before | (i[:, None] == i[None, :]), p, 0.0)
            at = (token * HEADS + h)[:, None] * C + i[None, :]
            tl.store(mixing + at, p, mask=real[:, None])
            if DELTA:
                a = _dot(k_CD, tl.trans(k_CD), FLOAT32) * between * by[:, None]
                a = tl.where(before, a, 0.0)
                x = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
                # x holds the inverses of diagonal blocks; each turn joins neighbours, as
                # [[x, 0], [a, y]]^-1 = [[x^-1, 0], [-y^-1 a x^-1, y^-1]]
                for level in tl.range(0, LEVELS, num_stages=1):
                    half = i >> level
                    pair = half >> 1
                    joins = (pair[:, None] == pair[None, :]) & (half[:, None] != half[None, :])
                    below = _dot(x, tl.where(joins, a, 0.0), FLOAT32)
                    x -= _dot(below, x, FLOAT32)
                tl.store(inverse + at, x, mask=real[:, None])
        else:
            value = tl.arange(0, VS)
            nothing = tl.zeros((C, VS), out.dtype.element_ty)
            into = token[:, None] * out_row + h * out_head + value[None, :]
            tl.store(out + into, nothing, mask=real[:, None] & (value < V)[None, :])


@triton.jit(do_not_specialize=COUNTS)
def scan_kernel(
    q, k, v, rate, decay, slots, lens, starts, mixing, inverse, state, out, T, HEADS,
    q_row, q_head, k_row, k_head, v_row, v_head, rate_row, decay_row,
    slot_step, head_step, key_step, value_step, out_row, out_head, scale,
    DELTA: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DS: tl.constexpr,
    V: tl.constexpr, VS: tl.constexpr, SHORT: tl.constexpr, C: tl.constexpr,
    FLOAT32: tl.constexpr,
):  # fmt: skip
    """VS values of one head of a request of more than SHORT tokens, its chunks in order."""
    h, r = tl.program_id(1).to(tl.int64), tl.program_id(2)
    begin, end, live, past = request(starts, lens, r, T)
    if live & (end - begin > SHORT):
        i, d = tl.arange(0, C), tl.arange(0, DS)
        n = tl.program_id(0) * VS + tl.arange(0, VS)
        of_key, of_value = d < D, n < V
        slot = tl.load(slots + r).to(tl.int64)
        there = of_key[:, None] & of_value[None, :]
        home = slot * slot_step + h * head_step + d[:, None] * key_step + n[None, :] * value_step
        s = tl.load(state + home, mask=there & past & (slot >= 0), other=0.0).to(tl.float32)
        key_head = h // GROUP
        for first in tl.range(begin, end, C, num_stages=1):
            token = first + i.to(tl.int64)
            real = token < end
            at = token[:, None] * q_row + key_head * q_head + d[None, :]
            q_CD = tl.load(q + at, mask=real[:, None] & of_key[None, :], other=0.0).to(tl.float32)
            at = token[:, None] * k_row + key_head * k_head + d[None, :]
            k_CD = tl.load(k + at, mask=real[:, None] & of_key[None, :], other=0.0).to(tl.float32)
            at = token[:, None] * v_row + h * v_head + n[None, :]
            u = tl.load(v + at, mask=real[:, None] & of_value[None, :], other=0.0).to(tl.float32)
            by, g = _rates(rate + h, decay + h, rate_row, decay_row, token, real, DELTA)
            later = (i < C - 1) & (token + 1 < end)
            _, g_next = _rates(rate + h, decay + h, rate_row, decay_row, token + 1, later, DELTA)
            since_C = tl.exp(tl.cumsum(g, 0))
            until_C = tl.exp(tl.cumsum(g_next, 0, reverse=True))
            at = (token * HEADS + h)[:, None] * C + i[None, :]
            if DELTA:
                u -= since_C[:, None] * _dot(k_CD, s, FLOAT32)
                x = tl.load(inverse + at, mask=real[:, None], other=0.0)
                u = _dot(x, u * by[:, None], FLOAT32)
            else:
                u *= by[:, None]
            p = tl.load(mixing + at, mask=real[:, None], other=0.0)
            o = _dot(q_CD, s, FLOAT32) * (since_C * scale)[:, None] + _dot(p, u, FLOAT32)
            at = token[:, None] * out_row + h * out_head + n[None, :]
            tl.store(out + at, o.to(out.dtype.element_ty), mask=real[:, None] & of_value[None, :])
            s = s * tl.exp(tl.sum(g, 0)) + _dot(tl.trans(k_CD * until_C[:, None]), u, FLOAT32)
        tl.debug_barrier()  # all threads have read the state
        tl.store(state + home, s.to(state.dtype.element_ty), mask=there & (slot >= 0))
