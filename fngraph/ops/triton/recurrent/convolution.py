"""The Triton backend of the causal convolution: one kernel, for any mix of requests.

A tile holds some tokens of one request, found as in `tiles`. The tile with a
request's first tokens is the only one that needs its state, and so it writes the new one as well.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fngraph.core import HostBounds
from fngraph.ops.paged.config import dense
from fngraph.ops.recurrent.convolution import CausalConvArgs
from fngraph.ops.triton.launching import COUNTS, launch, power_of_two
from fngraph.ops.triton.recurrent.token import request
from fngraph.ops.triton.repeating import Launches
from fngraph.ops.triton.tiling import find, lanes, tiles

TOKENS = 16  # a tile, at most
CHANNELS = 128


@triton.jit(do_not_specialize=COUNTS)
def conv_kernel(
    x, weight, slots, lens, starts, state, out, T, R,
    x_row, weight_row, slot_step, channel_step, tap_step, out_row,
    C: tl.constexpr, W: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
    REQS: tl.constexpr,
):  # fmt: skip
    """CHANNELS channels of TOKENS tokens of one request; zeros where they are nobody's."""
    tile = tl.program_id(1)
    r, begin, first = find(starts, tile, R, TOKENS, REQS)
    end = T
    live = False
    past = False
    slot = tl.full((), -1, tl.int64)
    if r < R:
        begin, end, live, past = request(starts, lens, r, T)
        slot = tl.load(slots + r).to(tl.int64)
    if first < end:
        c = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
        of_channel = c < C
        token = first + tl.arange(0, TOKENS)
        there = (token < end)[:, None] & of_channel[None, :]
        acc = tl.zeros((TOKENS, CHANNELS), tl.float32)
        home = state + slot * slot_step + c.to(tl.int64) * channel_step
        old = past & (slot >= 0)
        if live:
            for tap in tl.static_range(W):
                at = token + (tap - (W - 1))
                new = (at >= begin)[:, None] & there
                x_TC = tl.load(x + at.to(tl.int64)[:, None] * x_row + c[None, :], new, 0.0)
                x_TC = x_TC.to(tl.float32)
                if first == begin:
                    behind = (at - begin + (W - 1))[:, None] * tap_step
                    late = (at < begin)[:, None] & there & old
                    x_TC += tl.load(home[None, :] + behind, late, 0.0).to(tl.float32)
                by = tl.load(weight + c * weight_row + tap, mask=of_channel, other=0.0)
                acc += x_TC * by.to(tl.float32)[None, :]
        into = out + token.to(tl.int64)[:, None] * out_row + c[None, :]
        tl.store(into, acc.to(out.dtype.element_ty), mask=there)
        if live & (first == begin) & (slot >= 0):
            for tap in tl.static_range(W - 1):
                last = end + (tap - (W - 1))
                x_C = tl.load(x + last.to(tl.int64) * x_row + c, of_channel & (last >= begin), 0.0)
                place = home + (last - begin + (W - 1)) * tap_step
                s_C = tl.load(place, of_channel & (last < begin) & old, 0.0)
                tl.debug_barrier()  # all threads have read what the store replaces
                s_C = tl.where(last >= begin, x_C.to(tl.float32), s_C.to(tl.float32))
                tl.store(home + tap * tap_step, s_C.to(state.dtype.element_ty), of_channel)


def run(args: CausalConvArgs, host: HostBounds | None, kept: Launches | None = None) -> None:
    """See `fngraph.ops.causal_conv`; shape letters are listed there."""
    x_TC, weight_CW = dense(args.x), dense(args.weight)
    state, meta, out_TC = args.state, args.meta, args.out
    (T, C), R, W = x_TC.shape, meta.seq_lens.shape[0], args.config.taps
    longest = min(T, (host and host.max_query_len) or T)
    tokens = max(power_of_two(W - 1), min(TOKENS, power_of_two(longest)))
    launch(
        conv_kernel,
        (-(-C // CHANNELS), tiles(T, R, tokens)),
        (x_TC, weight_CW, meta.state_slots, meta.seq_lens, meta.query_start_loc),
        (state, out_TC),
        (T, R, x_TC.stride(0), weight_CW.stride(0), *state.stride(), out_TC.stride(0)),
        kept=kept,
        C=C,
        W=W,
        TOKENS=tokens,
        CHANNELS=CHANNELS,
        REQS=lanes(R),
    )
