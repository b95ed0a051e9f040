"""The Triton kernel of a recurrence token by token: gated delta rule and state space alike.

Both keep a state S of keys by values, and per head and token: S <- exp(g) S; S <- S + k u; o = q S.
With DELTA, u = rate (v - k S) and g is given; without, u = rate v and g = rate times a head's own.
(A state space's c, b, x and dt are its q, k, v and rate.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from fngraph.ops.triton.launching import COUNTS


@triton.jit
def request(starts, lens, r, T):
    """(first token, end, live, has a past) of request r; live is whether it is there at all."""
    begin, end = tl.load(starts + r), tl.load(starts + r + 1)
    length = tl.load(lens + r)
    live = (length > 0) & (end > begin)
    return begin, tl.minimum(end, T), live, live & (length > end - begin)


@triton.jit(do_not_specialize=COUNTS)
def recurrent_kernel(
    q, k, v, rate, decay, slots, lens, starts, state, out, T, R,
    q_row, q_head, k_row, k_head, v_row, v_head, rate_row, decay_row,
    slot_step, head_step, key_step, value_step, out_row, out_head, scale,
    DELTA: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DS: tl.constexpr,
    V: tl.constexpr, VS: tl.constexpr, SHORT: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """VS values of one head of a request of up to SHORT tokens; the state goes in and out once.

    Zeros where nobody's tokens are. With REST there is no other kernel: past the last request too,
    and requests of any length.
    """
    h, r = tl.program_id(1).to(tl.int64), tl.program_id(2)
    begin, end, live, past = request(starts, lens, r, T)
    d, n = tl.arange(0, DS), tl.program_id(0) * VS + tl.arange(0, VS)
    of_key, of_value = d < D, n < V
    into = out + h * out_head + n
    nothing = tl.zeros((VS,), out.dtype.element_ty)
    if REST:
        used = tl.load(starts + R).to(tl.int64)
        for past_end in tl.range(r, T - used, R):
            tl.store(into + (used + past_end) * out_row, nothing, mask=of_value)
    if REST | (end - begin <= SHORT):
        if live:
            slot = tl.load(slots + r).to(tl.int64)
            there = of_key[:, None] & of_value[None, :]
            at = slot * slot_step + h * head_step + d[:, None] * key_step + n[None, :] * value_step
            s = tl.load(state + at, mask=there & past & (slot >= 0), other=0.0).to(tl.float32)
            key_head = h // GROUP
            for i in tl.range(0, end - begin):
                t = begin.to(tl.int64) + i
                q_D = tl.load(q + t * q_row + key_head * q_head + d, mask=of_key, other=0.0)
                k_D = tl.load(k + t * k_row + key_head * k_head + d, mask=of_key, other=0.0)
                u_V = tl.load(v + t * v_row + h * v_head + n, mask=of_value, other=0.0)
                by = tl.load(rate + t * rate_row + h).to(tl.float32)
                g = tl.load(decay + t * decay_row + h).to(tl.float32)
                k_D, u_V = k_D.to(tl.float32), u_V.to(tl.float32)
                s *= tl.exp(g if DELTA else g * by)
                if DELTA:
                    u_V -= tl.sum(k_D[:, None] * s, 0)
                s += k_D[:, None] * (u_V * by)[None, :]
                o_V = tl.sum(q_D.to(tl.float32)[:, None] * s, 0) * scale
                tl.store(into + t * out_row, o_V.to(out.dtype.element_ty), mask=of_value)
            tl.debug_barrier()  # all threads have read the state
            tl.store(state + at, s.to(state.dtype.element_ty), mask=there & (slot >= 0))
        else:
            for i in tl.range(0, end - begin):
                tl.store(into + (begin.to(tl.int64) + i) * out_row, nothing, mask=of_value)
