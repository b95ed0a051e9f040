"""Triton backends of the gated delta rule and the state space: two recurrences, the same kernels.

A request of up to SHORT tokens goes token by token, a longer one chunk by chunk, whatever batch it
comes in: its bits depend on itself alone. The grids depend on T and R alone, and a batch that is
known to hold short requests only (decode, verifying drafts) is one launch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fngraph.core import HostBounds
from fngraph.ops.attention_config import dense
from fngraph.ops.recurrent import StateMeta
from fngraph.ops.triton_chunks import chunk_kernel, scan_kernel
from fngraph.ops.triton_launch import launch, power_of_two
from fngraph.ops.triton_recurrent import recurrent_kernel
from fngraph.ops.triton_tiles import lanes, tiles

SHORT = 8  # tokens that cost no more one by one than a chunk does
CHUNK, EXACT_CHUNK = 64, 16  # tokens; float32 goes without tensor cores, in small tiles
VALUES, EXACT_VALUES = 32, 16  # of a head, a program: its tile of the state has them by all keys


def gated_delta(
    q_TGD: Tensor,
    k_TGD: Tensor,
    v_THV: Tensor,
    g_TH: Tensor,
    beta_TH: Tensor,
    state: Tensor,
    meta: StateMeta,
    out_THV: Tensor,
    *,
    config: Any,
    host: HostBounds | None,
) -> None:
    """See `fngraph.ops.gated_delta`; shape letters are listed there."""
    tokens = (q_TGD, k_TGD, v_THV, beta_TH, g_TH)
    steps = state.stride()  # slots, heads, keys, values
    _run(*tokens, state, steps, meta, out_THV, config.scale, config, host, delta=True)


def ssd(
    x_THP: Tensor,
    dt_TH: Tensor,
    a_H: Tensor,
    b_TGN: Tensor,
    c_TGN: Tensor,
    state: Tensor,
    meta: StateMeta,
    out_THP: Tensor,
    *,
    config: Any,
    host: HostBounds | None,
) -> None:
    """See `fngraph.ops.ssd`; shape letters are listed there."""
    tokens = (c_TGN, b_TGN, x_THP, dt_TH, a_H)
    of_slot, of_head, of_value, of_key = state.stride()
    steps = (of_slot, of_head, of_key, of_value)
    _run(*tokens, state, steps, meta, out_THP, 1.0, config, host, delta=False)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rate: Tensor,
    decay: Tensor,
    state: Tensor,
    steps: tuple[int, ...],
    meta: StateMeta,
    out: Tensor,
    scale: float,
    config: Any,
    host: HostBounds | None,
    *,
    delta: bool,
) -> None:
    q, k, v, rate, decay = (dense(x) for x in (q, k, v, rate, decay))
    (T, H, V), (G, D), R = v.shape, k.shape[1:], meta.seq_lens.shape[0]
    longest = min(T, (host and host.max_query_len) or T)
    of_keys = (*q.stride()[:2], *k.stride()[:2])
    of_rates = (rate.stride(0), decay.stride(0) if delta else 0)
    of_out, where = out.stride()[:2], (meta.seq_lens, meta.query_start_loc)
    strides = (*of_keys, *v.stride()[:2], *of_rates, *steps, *of_out)
    exact, widest = config.dtype == torch.float32, power_of_two(V, at_least=16)
    constants: dict[str, Any] = {
        "DELTA": delta, "GROUP": H // G, "D": D, "DS": power_of_two(D, at_least=16), "V": V,
        "SHORT": SHORT,
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
