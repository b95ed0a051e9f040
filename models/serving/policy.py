"""`Policy`: what a server is set to, as a value."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any

import fngraph as fg

LEAST = {  # of each number
    "max_tokens": 1, "max_reqs": 1, "max_blocks": 1, "block_size": 1, "ngram": 1, "cascade": 0,
    "cascade_reqs": 1, "reserve": 0, "num_slots": 0, "max_bias": 1, "max_logprobs": 1,
    "decode_many": 1,
}  # fmt: skip


def whole(name: str, value: Any) -> int:
    """A whole number, of whatever type, as machines have them.

    Raises:
        TypeError: it is none, with its name. ValueError: one of more than 64 bits.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{fg.core.text.what_is(name, value)}: pass a whole number")
    if number.bit_length() > 63:
        raise ValueError(
            f"{name} is far too large: a number of {number.bit_length()} bits, where no count has "
            "more than 63. Pass a smaller one"
        )
    return number


@fg.core.text.with_suggestions
@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """What a server is set to. Nothing here changes the tokens of a request that runs.

    Attributes:
        max_tokens: token budget of a step.
        max_reqs: requests in a step, and running at all.
        max_blocks: of one request (B).
        block_size: tokens a block.
        query_lens: of the uniform batches that are captured: 1, and 1 + k for k draft tokens.
        ngram: tokens that must have occurred before, for what followed them to be a draft.
        share: whether texts that begin alike share blocks, those of texts that have ended too; not
            where there is recurrent state.
        cascade: tokens that all requests of a step must share for a cascade batch; 0: none ever.
        cascade_reqs: requests that such a batch has at least.
        reserve: blocks that stay free for each running request when another one joins, or it would
            soon be thrown out again.
        num_slots: slots of recurrent state, of which each running request has one; 0: no state.
        max_bias: tokens whose logits one request changes by name, `logit_bias` and barred stops.
        max_logprobs: of the likeliest tokens, that a request may have reported.
        decode_many: tokens that each request gets at most from one launch, where nobody waits and
            all are past their prompts; 1: one. Drafts are looked up and verified on the way. See
            `fngraph.models.serving.many`.
    """

    max_tokens: int
    max_reqs: int
    max_blocks: int
    block_size: int = 16
    query_lens: tuple[int, ...] = (1,)
    ngram: int = 3
    share: bool = True
    cascade: int = 0
    cascade_reqs: int = 2
    reserve: int = 1
    num_slots: int = 0
    max_bias: int = 64
    max_logprobs: int = 20
    decode_many: int = 1

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            if whole(name, getattr(self, name)) < least:
                raise ValueError(f"{name}={getattr(self, name)}: pass {name}={least} or more")
        if not hasattr(self.query_lens, "__iter__"):
            some = "(1,)" if self.query_lens == 1 else f"(1, {self.query_lens!r})"
            raise TypeError(f"query_lens={self.query_lens!r}: pass a tuple of them, {some}")
        fg.core.text.expect(bool, "True or False", TypeError, share=self.share)
        if min(whole("query_lens", q) for q in self.query_lens or (0,)) != 1:
            raise ValueError(
                f"query_lens={self.query_lens} lacks 1, a step without drafts, or goes below it"
            )
        if self.num_slots and (self.share or self.query_lens != (1,)):
            raise ValueError(
                "a recurrent state cannot be shared, nor go back over rejected drafts. Pass "
                "share=False, query_lens=(1,)"
            )

    @property
    def limits(self) -> fg.Limits:
        """The limits of every step; Q is the tokens that a request draws at most."""
        return fg.Limits(self.max_tokens, self.max_reqs, B=self.max_blocks, Q=max(self.query_lens))
