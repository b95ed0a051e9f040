"""Backends `sdpa` and `flex`: torch's attention of dense rows, over keys that are gathered first.

A paged batch becomes rows: N rows of Q queries each, over S = B * block_size keys. A row is a
request where requests are about equally long, else a token. Groups of query heads that share a kv
head become queries, so that H = K. Every size comes from shapes and host bounds: nothing waits.

`sdpa` is right for any batch, and for decode as fast as the copy. It is captured for uniform
batches, whose requests are its rows; a mixed batch whose requests are not of about one length goes
token by token, which is no work for a graph of its own.

`flex` is called without `torch.compile`, which would compile once a shape, and so once a key: so it
is not fused, and holds all scores in memory. It is here to compare with, and for score rules that
nothing else has. It is never captured: unfused, torch copies a number to the device on the way,
which no graph can hold, and the tape sees ATen ops, which this is none of.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from einops import rearrange, repeat
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fngraph.core import HostBounds, Support
from fngraph.ops.backend import Backend
from fngraph.ops.paged.config import (
    AttentionArgs,
    AttentionConfig,
    AttentionMeta,
    owners,
    sees_nothing,
)
from fngraph.ops.paged.reference import write_new
from fngraph.ops.slots import read_cache, some_at_a_time, times_scale

OPTIONS = ("bidirectional", "cache scales", "fp8 cache")


def run_sdpa(args: AttentionArgs, host: HostBounds | None) -> None:
    """See `fngraph.ops.attention`."""

    def attend(q_NKQD: Tensor, k_NKSD: Tensor, v_NKSD: Tensor, seen_NQS: Tensor) -> Tensor:
        mask = seen_NQS[:, None]
        return scaled_dot_product_attention(
            q_NKQD, k_NKSD, v_NKSD, attn_mask=mask, scale=args.config.scale
        )

    _attend_rows(attend, args, host)


def run_flex(args: AttentionArgs, host: HostBounds | None) -> None:
    """See `fngraph.ops.attention`."""
    from torch.nn.attention.flex_attention import flex_attention  # brings dynamo in

    config = args.config

    def attend(q_NKQD: Tensor, k_NKSD: Tensor, v_NKSD: Tensor, seen_NQS: Tensor) -> Tensor:
        def score_mod(score: Any, n: Any, head: Any, q: Any, k: Any) -> Any:
            if config.softcap is not None:
                score = torch.tanh(score / config.softcap) * config.softcap
            return torch.where(seen_NQS[n, q, k], score, -float("inf"))

        with warnings.catch_warnings():  # of being unfused, which is said above
            warnings.simplefilter("ignore")
            out = flex_attention(q_NKQD, k_NKSD, v_NKSD, score_mod=score_mod, scale=config.scale)
        return out  # type: ignore[return-value]

    _attend_rows(attend, args, host)


SDPA = Backend(
    "sdpa",
    run_sdpa,
    support=lambda config: Support.UNIFORM_BATCH,
    supports=lambda config: (
        None if config.softcap is None else "scaled_dot_product_attention has no softcap"
    ),
    options=OPTIONS,
)
FLEX = Backend("flex", run_flex, support=lambda config: Support.NEVER, options=OPTIONS)


Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""`attend(q_NKQD, k_NKSD, v_NKSD, seen_NQS) -> (N, K, Q, D)`; every query sees a key at least."""


def _attend_rows(attend: Attend, args: AttentionArgs, host: HostBounds | None) -> None:
    """Write k and v, then let `attend` attend over dense rows, some of them at a time."""
    write_new(args)
    q_THD, meta, config = args.q, args.meta, args.config
    T, R = q_THD.shape[0], meta.seq_lens.shape[0]
    if not T or sees_nothing(meta):
        args.out.zero_()
        return
    G = config.num_heads // config.num_kv_heads
    rows = rows_of(meta, T, _query_len(host, T, R))
    parts = []
    for part in some_at_a_time(rows.len_N.shape[0], meta.block_tables, args.k_cache):
        table, length = rows.table_NB[part], rows.len_N[part]
        seen_NQS = _seen_keys(
            rows.position_NQ[part], length, table.shape[1] * config.block_size, config
        )
        known_NS = seen_NQS.any(1)  # what none of a row sees may hold NaN
        k_NKSD, v_NKSD = (
            rearrange(
                times_scale(
                    rearrange(read_cache(cache, table, q_THD.dtype), "n b s k d -> n (b s) k d")
                    .masked_fill(~known_NS[:, :, None, None], 0.0),
                    scale,
                ),
                "n s k d -> n k s d",
            )
            for cache, scale in zip(args.kv, (args.k_scale, args.v_scale))
        )  # fmt: skip
        none_NQ = ~seen_NQS.any(2)
        q_NQHD = q_THD[rows.token_NQ[part]].masked_fill(
            none_NQ[..., None, None], 0.0
        )  # it may be NaN
        q_NKQD = rearrange(q_NQHD, "n q (k g) d -> n k (g q) d", g=G)
        safe_NQS = torch.cat([seen_NQS[..., :1] | none_NQ[..., None], seen_NQS[..., 1:]], -1)
        out_NKQD = attend(q_NKQD, k_NKSD, v_NKSD, repeat(safe_NQS, "n q s -> n (g q) s", g=G))
        out_NQHD = rearrange(out_NKQD, "n k (g q) d -> n q (k g) d", g=G)
        parts.append(out_NQHD.flatten(0, 1))  # a query that sees nothing has seen a zero
    args.out.copy_(torch.cat(parts)[rows.row_T].masked_fill(~rows.owned_T[:, None, None], 0.0))


class Rows(NamedTuple):
    """Where the tokens of a batch go.

    Attributes:
        token_NQ: number of each query's token; any where there is none.
        position_NQ: of it in its request; negative where there is none.
        len_N: tokens of the request.
        table_NB: its blocks.
        row_T: from a token to its place in N * Q.
        owned_T: whether it belongs to a request at all.
    """

    token_NQ: Tensor
    position_NQ: Tensor
    len_N: Tensor
    table_NB: Tensor
    row_T: Tensor
    owned_T: Tensor


def rows_of(meta: AttentionMeta, T: int, query_len: int | None) -> Rows:
    """A row for each request of at most `query_len` tokens; for each token, if None."""
    starts = meta.query_start_loc.long()
    R = starts.shape[0] - 1
    token_T = torch.arange(T, device=starts.device)
    owner_T, owned_T = owners(token_T, starts)
    len_R = meta.seq_lens.long()
    if query_len is None:
        position_T = torch.where(owned_T, len_R[owner_T] - (starts[owner_T + 1] - token_T), -1)
        table_TB = meta.block_tables.long()[owner_T]
        return Rows(
            token_T[:, None], position_T[:, None], len_R[owner_T], table_TB, token_T, owned_T
        )
    token_RQ = starts[:-1, None] + torch.arange(query_len, device=starts.device)
    position_RQ = len_R[:, None] - (starts[1:, None] - token_RQ)
    position_RQ = torch.where(token_RQ < starts[1:, None], position_RQ, -1)
    row_T = (owner_T * query_len + token_T - starts[owner_T]).clamp(max=R * query_len - 1)
    table_RB = meta.block_tables.long()
    return Rows(token_RQ.clamp(max=T - 1), position_RQ, len_R, table_RB, row_T, owned_T)


def _query_len(host: HostBounds | None, T: int, R: int) -> int | None:
    """Queries of a row where a row is to be a request; None: rows of one token waste less."""
    query_len = min(T, (host and host.max_query_len) or T)
    return query_len if R * query_len <= 2 * T else None


def _seen_keys(position_NQ: Tensor, len_N: Tensor, S: int, config: AttentionConfig) -> Tensor:
    key_S = torch.arange(S, device=len_N.device)
    at = position_NQ[..., None]
    last = at if config.causal else (len_N - 1)[:, None, None]
    seen_NQS = (key_S <= last) & (at >= 0)
    if config.window is not None:
        seen_NQS &= (key_S > at - config.window) & (key_S < at + config.window)
    return seen_NQS
