"""A paged batch as dense rows of queries over gathered keys, for backends that know no paging.

Letters: N rows of Q queries each, over S = B * block_size keys. A row is a request where requests
are about equally long, else a token. Groups of query heads that share a kv head become queries, so
that H = K. Every size comes from shapes and host bounds: nothing waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from einops import rearrange, repeat
from torch import Tensor

from fngraph.core import HostBounds
from fngraph.ops.paged.config import AttentionConfig, AttentionMeta
from fngraph.ops.paged.reference import AT_ONCE, read, write

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""`attend(q_NKQD, k_NKSD, v_NKSD, seen_NQS) -> (N, K, Q, D)`; every query sees a key at least."""


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
    owner_T = (token_T[:, None] >= starts[1:]).sum(1)
    owned_T, owner_T = owner_T < R, owner_T.clamp(max=R - 1)
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


def query_len_of(host: HostBounds | None, T: int, R: int) -> int | None:
    """Queries of a row where a row is to be a request; None: rows of one token waste less."""
    query_len = min(T, (host and host.max_query_len) or T)
    return query_len if R * query_len <= 2 * T else None


def run(
    attend: Attend,
    q_THD: Tensor,
    new: tuple[Tensor, Tensor],
    kv: tuple[Tensor, Tensor],
    meta: AttentionMeta,
    out_THD: Tensor,
    config: AttentionConfig,
    host: HostBounds | None,
    scales: tuple[Tensor | None, Tensor | None],
) -> None:
    """Write k and v, then let `attend` attend over dense rows, some of them at a time."""
    for cache, x_TKD, scale in zip(kv, new, scales):
        write(cache, x_TKD, meta.slot_mapping, scale)
    T, R = q_THD.shape[0], meta.seq_lens.shape[0]
    rows = rows_of(meta, T, query_len_of(host, T, R))
    at_once = max(1, AT_ONCE // (meta.block_tables.shape[1] * kv[0][0].numel()))
    parts = []
    for first in range(0, rows.len_N.shape[0], at_once):
        token, position, length, table = (x[first : first + at_once] for x in rows[:4])
        seen_NQS = _seen(position, length, table.shape[1] * config.block_size, config)
        known_NS = seen_NQS.any(1)  # what none of a row sees may hold NaN
        k_NKSD, v_NKSD = (
            rearrange(
                rearrange(read(cache, table, q_THD.dtype, scale), "n b s k d -> n (b s) k d")
                .masked_fill(~known_NS[:, :, None, None], 0.0),
                "n s k d -> n k s d",
            )
            for cache, scale in zip(kv, scales)
        )  # fmt: skip
        G = config.num_heads // config.num_kv_heads
        none_NQ = ~seen_NQS.any(2)
        q_NQHD = q_THD[token].masked_fill(none_NQ[..., None, None], 0.0)  # it may be NaN
        q_NKQD = rearrange(q_NQHD, "n q (k g) d -> n k (g q) d", g=G)
        safe_NQS = torch.cat([seen_NQS[..., :1] | none_NQ[..., None], seen_NQS[..., 1:]], -1)
        out_NKQD = attend(q_NKQD, k_NKSD, v_NKSD, repeat(safe_NQS, "n q s -> n (g q) s", g=G))
        out_NQHD = rearrange(out_NKQD, "n k (g q) d -> n q (k g) d", g=G)
        parts.append(out_NQHD.flatten(0, 1))  # a query that sees nothing has seen a zero
    out_THD.copy_(torch.cat(parts)[rows.row_T].masked_fill(~rows.owned_T[:, None, None], 0.0))


def _seen(position_NQ: Tensor, len_N: Tensor, S: int, config: AttentionConfig) -> Tensor:
    key_S = torch.arange(S, device=len_N.device)
    at = position_NQ[..., None]
    last = at if config.causal else (len_N - 1)[:, None, None]
    seen_NQS = (key_S <= last) & (at >= 0)
    if config.window is not None:
        seen_NQS &= (key_S > at - config.window) & (key_S < at + config.window)
    return seen_NQS
