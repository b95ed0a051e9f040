"""What requests ask of their logits beside a draw, inside the step: penalties, biases, masks, and
how likely a token was.

All of it is a function of leaves of the batch: the text so far is one of them, so there is no count
to be kept between steps, and a draft that is rejected leaves none behind. A row that asks for
nothing gets its logits back as they were, bit by bit.

Shape letters: R requests, Q tokens drawn for each, V vocab, L tokens that a text may have, K tokens
changed by name, W words of 32 tokens, N likeliest tokens.

Source: the repetition penalty of Keskar et al., CTRL, 2019 (arXiv:1909.05858), with logits below 0
multiplied as all who serve it do; presence and frequency penalties as OpenAI's API has them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import fngraph as fg
from fngraph.models.serving.grammars import words_for
from fngraph.models.serving.requests import Logprob, Request, Row

FOREVER = 2**31 - 1  # a place that no text reaches
LOGITS: dict[str, partial[Any]] = {  # leaves of a batch, by name: what declares them
    "text": partial(fg.buffer, "R L", "int32", pad=0),  # from its start, drafts included
    "prompt_lens": partial(fg.buffer, "R", "int32", pad=0),
    "repetition_penalty": partial(fg.buffer, "R", "float32", pad=1),
    "presence_penalty": partial(fg.buffer, "R", "float32", pad=0),
    "frequency_penalty": partial(fg.buffer, "R", "float32", pad=0),
    "bias_ids": partial(fg.buffer, "R K", "int64", pad=0),
    "bias": partial(fg.buffer, "R K", "float32", pad=0),
    "bias_until": partial(fg.buffer, "R K", "int32", pad=0),  # the place from which it is 0
    "allowed": partial(fg.buffer, "R Q W", "int32", pad=-1),  # bit i of word w: token 32 w + i
}


class Drawn(NamedTuple):
    """What a step gives whose batch has these leaves.

    Attributes:
        ids: (R, Q) int64.
        logprobs: (R, Q) float32, of these ids by the model's own logits.
        top_ids, top_logprobs: (R, Q, N), of the likeliest tokens.
    """

    ids: Tensor
    logprobs: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


def changed(logits: Tensor, batch: Any, places: Tensor) -> Tensor:
    """Logits after penalties, then biases, then masks.

    Args:
        logits: (R, Q, V).
        batch: with the leaves of LOGITS.
        places: (R, Q) int64, the place in its text of the token that is drawn.

    Returns:
        (R, Q, V), float32 or wider.

    Raises:
        ValueError: masks of another vocabulary.
    """
    Q, V = logits.shape[1:]
    if words_for(V) != batch.allowed.shape[-1]:
        raise ValueError(
            f"the steps were made for a vocabulary of up to {32 * batch.allowed.shape[-1]}, and "
            f"there are {V} logits. Pass make_steps(..., vocab_size={V})"
        )
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    of_each = lambda leaf: leaf[:, None, None]  # noqa: E731
    at_L = torch.arange(batch.text.shape[1], device=x.device)
    text_RQL = batch.text.long()[:, None].expand(-1, Q, -1)
    there_RQL = at_L < places[..., None]
    new_RQL = there_RQL & (at_L >= of_each(batch.prompt_lens))
    times = torch.zeros_like(x).scatter_add(-1, text_RQL, new_RQL.to(x.dtype))
    seen = torch.zeros_like(x).scatter_add(-1, text_RQL, there_RQL.to(x.dtype)) > 0

    factor = of_each(batch.repetition_penalty)
    x = torch.where(seen, torch.where(x > 0, x / factor, x * factor), x)
    x = x - of_each(batch.frequency_penalty) * times
    x = x - of_each(batch.presence_penalty) * (times > 0)

    live_RQK = places[..., None] < batch.bias_until[:, None]
    bias_RQK = torch.where(live_RQK, batch.bias[:, None], 0.0).to(x.dtype)
    x = x.scatter_add(-1, batch.bias_ids[:, None].expand(-1, Q, -1), bias_RQK)

    id_V = torch.arange(V, device=x.device)
    words_RQV = batch.allowed.index_select(-1, id_V // 32)
    return x.masked_fill(words_RQV >> (id_V % 32).int() & 1 == 0, -math.inf)


def drawn(logits: Tensor, ids: Tensor, most: int) -> Drawn:
    """`ids`, how likely they were by these logits, and the likeliest tokens.

    Args:
        logits: (R, Q, V), the model's.
        ids: (R, Q) int64; of FAILED the number means nothing.
        most: N, or all tokens if there are fewer.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    all_RQV = torch.log_softmax(logits.to(wide), -1)
    own_RQ = all_RQV.gather(-1, ids.clamp(min=0)[..., None]).squeeze(-1)
    top, top_ids = all_RQV.topk(min(most, logits.shape[-1]), dim=-1)
    return Drawn(ids, own_RQ, top_ids, top)


def on_host(ids: Tensor | Drawn, rows: Sequence[Row]) -> tuple[list, list | None]:
    """What `advance` takes: the tokens, and their logprobs if a request wants any; it waits."""
    if isinstance(ids, Tensor):
        return ids.tolist(), None
    wanted = [row.job.request.logprobs for row in rows]
    if all(most is None for most in wanted):
        return ids.ids.tolist(), None
    tokens, own, top_ids, top = (x.tolist() for x in ids)
    logprobs = [
        [Logprob(one, tuple(zip(i[: most or 0], p))) for one, i, p in zip(*places)]
        for most, *places in zip(wanted, own, top_ids, top)
    ]
    return tokens, logprobs


def first_rows(ids: Tensor | Drawn, count: int) -> Tensor | Drawn:
    """What a step gives, of its first requests: those behind them are padding."""
    return ids[:count] if isinstance(ids, Tensor) else Drawn(*(x[:count] for x in ids))


def fill(
    rows: Sequence[Row], asked: Sequence[Request], allowed: Mapping[int, np.ndarray],
    into: Mapping[str, np.ndarray],
) -> None:  # fmt: skip
    """The leaves of LOGITS but for the penalties.

    Args:
        asked: what each row asks for.
        allowed: by the request's number, (places, W) int32 of its grammar.
    """
    for name, empty in (("text", 0), ("bias_ids", 0), ("bias", 0), ("bias_until", 0)):
        into[name].fill(empty)
    into["allowed"].fill(-1)
    into["prompt_lens"][:] = [len(request.prompt) for request in asked]
    for i, ((job, _, drafts), request) in enumerate(zip(rows, asked)):
        if not request.shaped:
            continue
        if request.settings.changes_logits:
            length = len(job.tokens)
            into["text"][i, :length] = job.tokens.view()
            into["text"][i, length : length + len(drafts)] = drafts
        for k, (token, value, until) in enumerate(edits(request)):
            into["bias_ids"][i, k], into["bias"][i, k] = token, value
            into["bias_until"][i, k] = until
        if request.id in allowed:
            words = allowed[request.id]
            into["allowed"][i, : len(words)] = words


def edits(request: Request) -> list[tuple[int, float, int]]:
    """Tokens whose logits it changes by name, what is added, and up to which place."""
    found = [(token, value, FOREVER) for token, value in request.settings.biases.items()]
    if request.min_tokens:
        until = len(request.prompt) + request.min_tokens
        found += [(run[0], -math.inf, until) for run in request.stop if len(run) == 1]
    return found
