"""Prompts as they are given: strings become tokens, and what could never run is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fngraph.errors import SpecError
from fngraph.models.serving.policy import Policy


def tokens_of(prompts: Any, tokenizer: Any) -> Sequence[Sequence[int]]:
    """The tokens of prompts, which are such lists already, or strings.

    Raises:
        SpecError: one string in place of a list of them; strings among lists; no tokenizer.
    """
    if isinstance(prompts, str):
        raise SpecError(f"prompts is a string. Pass a list of them, [{prompts[:20]!r}]")
    if isinstance(prompts, Sequence) and any(isinstance(prompt, int) for prompt in prompts):
        raise SpecError(f"prompts is one list of tokens. Pass a list of such: [{prompts!r:.40}]")
    strings = [i for i, prompt in enumerate(prompts) if isinstance(prompt, str)]
    if not strings:
        return prompts  # type: ignore[no-any-return]
    if len(strings) < len(prompts):
        raise SpecError(
            f"prompt {strings[0]} is a string, and others are lists. Pass all of one kind"
        )
    if tokenizer is None:
        raise SpecError(
            f"prompt {strings[0]} is a string, and there is no tokenizer. Pass "
            "graphify_model(..., tokenizer=AutoTokenizer.from_pretrained(...)), or lists of tokens"
        )
    return [tokenizer(prompt)["input_ids"] for prompt in prompts]


def refuse_endless(
    i: int, length: int, max_new: int, policy: Policy, num_blocks: int, max_len: int | None
) -> None:
    """Raise unless prompt number `i` can run to its end.

    Raises:
        SpecError: it is empty, or too long for the limits, the cache or the model.
    """
    needed = -(-(length + max_new) // policy.block_size)
    most = min(policy.max_blocks, num_blocks)
    if not length or max_new < 1:
        raise SpecError(
            f"prompt {i} has {length} tokens and asks for {max_new} more. Pass at least 1 of each"
        )
    if needed > most:
        raise SpecError(
            f"prompt {i} has {length} tokens; with {max_new} new ones it takes {needed} blocks of "
            f"{policy.block_size}, and {most} are there. Pass Limits(..., B={needed}) and "
            f"num_blocks={needed} or more, or shorten it"
        )
    if max_len is not None and length + max_new - 1 > max_len:
        raise SpecError(
            f"prompt {i} has {length} tokens; with {max_new} new ones it goes beyond the model's "
            f"{max_len} positions. Shorten it, or ask for fewer"
        )
