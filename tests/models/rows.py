"""A batch of given texts in given blocks, laid out by the serving loop."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fngraph.models import Policy, llama
from fngraph.models.serving.batches import empty_batch, lay_out
from fngraph.models.serving.requests import Job, Request, Row
from fngraph.models.serving.texts.tokens import Tokens

Span = tuple[Sequence[int], Sequence[int], int, int]  # text, its blocks, first token, last + 1


def llama_batch(spans: Sequence[Span], B: int, block_size: int) -> llama.Batch:
    """Each text computes its tokens from first to last."""
    policy = Policy(4096, len(spans), B, block_size)
    rows = [
        Row(Job(Request(i, tuple(text), 1), Tokens(text), first, Tokens(blocks, np.int32), -1),
            last - first)
        for i, (text, blocks, first, last) in enumerate(spans)
    ]  # fmt: skip
    return lay_out(rows, policy, lambda spec: empty_batch(llama.Batch, policy, spec))
