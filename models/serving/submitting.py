"""`submit`: what a request may ask for, checked where it is asked."""

from __future__ import annotations

import dataclasses
import itertools
import math
import numbers
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import fngraph as fg
from fngraph.models.serving.blocks import blocks_for
from fngraph.models.serving.policy import Policy, whole
from fngraph.models.serving.requests import GREEDY, Job, Request, State, in_order, no_blocks
from fngraph.models.serving.sampling import Settings, check_settings, key_of
from fngraph.models.serving.texts.tokens import Tokens

Stop = str | int | Sequence[int]


@fg.core.text.with_suggestions
def submit(
    state: State, policy: Policy, prompt: Iterable[int], max_new: int, *,
    stop: Sequence[Stop] = (), min_tokens: int = 0, adapter: int = -1, settings: Settings = GREEDY,
    decode: Callable[[Sequence[int]], str] | None = None, logprobs: int | None = None,
    grammar: Callable[[tuple[int, ...]], Any] | None = None, n: int = 1, priority: int = 0,
    deadline: float = math.inf,
) -> State:  # fmt: skip
    """The state with one more request waiting, number `state.submitted`, or with `n` more.

    Args:
        prompt: tokens, one or more.
        max_new: the most new tokens that it gets.
        adapter: the slot of a LoRA adapter; -1: none.
        settings: how tokens are drawn, and what is asked of the logits.
        stop: tokens that end it, [eos]; runs of them, [[13, 13]]; or text, ["END"], wherever in its
            tokens it begins and ends.
        min_tokens: tokens that it has before it stops; a single token that would stop it is not
            drawn until then, the others are overlooked.
        decode: `text.decode`; events have text then.
        logprobs: report the drawn token's, and so many of the likeliest tokens'; 0: its own alone.
        grammar: called with the new tokens so far before each draw, it gives the tokens that may be
            drawn: ids, a bool for each token, or int32 words of one bit each. None: all may. Where
            it allows none, or raises, this request alone ends. A function of those tokens alone,
            which may be asked of a text that was only guessed.
        n: texts of one prompt, as requests of their own, their numbers in a row. The seed of text i
            is i more than the first one's.
        priority: lower goes first: of those that wait, and the last is the first to be thrown out.
        deadline: by the clock that `advance` is told, time.monotonic() for `serve`: the request
            ends at the end of that step, with what it has, its end "time".

    Raises:
        TypeError: a prompt or settings of another type; numbers that are not whole.
        ValueError: a request that could never run, so that it would wait for ever; tokens that no
            model has; settings out of their range; more than 65536 texts, or numbers of more than
            64 bits.
    """
    if not (isinstance(state, State) and isinstance(policy, Policy)):
        raise TypeError(
            "submit takes state, policy, prompt, max_new; these are "
            f"{type(state).__name__}, {type(policy).__name__}, ..."
        )
    if isinstance(prompt, str):
        raise TypeError(f"prompt={prompt[:20]!r}: pass its tokens, text.encode(prompt)")
    if not isinstance(settings, Settings):
        raise TypeError(f"settings={settings!r}: pass Settings(temperature=0.8, ...)")
    if isinstance(stop, str | bytes) or not hasattr(stop, "__iter__"):
        raise TypeError(f"stop={stop!r}: pass a list, stop=[{'' if stop is None else repr(stop)}]")
    if not hasattr(prompt, "__iter__"):
        raise TypeError(f"prompt={prompt!r}: pass a list of tokens")
    room = min(policy.max_blocks, state.pool.num_blocks) * policy.block_size
    given = tuple(itertools.islice(prompt, room + 1))  # one more is too many, however many come
    try:
        tokens = tuple(map(operator.index, given))
    except TypeError:  # found once more, to be named
        tokens = tuple(whole(f"prompt[{i}]", token) for i, token in enumerate(given))
    stops = _at_most(MOST_STOPS, "stop", stop)
    strings = tuple(one for one in stops if isinstance(one, str))
    ends = tuple(run_of(one) for one in stops if not isinstance(one, str))
    if strange := [token for run in ends for token in run if not 0 <= token < 2**31]:
        raise ValueError(
            f"stop has {_brief(strange[0])}, which is no token: leave it out where there is none"
        )
    max_new, adapter = whole("max_new", max_new), whole("adapter", adapter)
    min_tokens, n, priority = (
        whole("min_tokens", min_tokens), whole("n", n), whole("priority", priority)
    )  # fmt: skip
    if logprobs is not None and whole("logprobs", logprobs) < 0:
        raise ValueError(f"logprobs={logprobs}: pass 0 for the drawn token's alone, or more")
    if not tokens or max_new < 1 or not all(ends) or not all(strings):
        raise ValueError(
            f"a request needs a prompt token, max_new >= 1 and no empty stop, got {len(tokens)}, "
            f"{max_new} and {(*ends, *strings)}"
        )
    if not 0 <= min(tokens) <= max(tokens) < 2**31:
        at = next(i for i, token in enumerate(tokens) if not 0 <= token < 2**31)
        raise ValueError(
            f"prompt[{at}]={_brief(tokens[at])} is no token: they are counted from 0, up to 2**31"
        )
    if adapter < -1:
        raise ValueError(f"adapter={adapter}: pass a slot's number, from 0 on; -1 for none")
    if not 0 <= min_tokens <= max_new:
        raise ValueError(f"min_tokens={min_tokens}: pass 0 to max_new={max_new}")
    if not 1 <= n <= MOST_TEXTS:
        raise ValueError(
            f"n={n}: pass how many texts, 1 to {MOST_TEXTS}. Each is a request of its own, which "
            "waits with all that it needs: for more, submit again when some have ended"
        )
    for name, given_fn in (("decode", decode), ("grammar", grammar)):
        if given_fn is not None and not callable(given_fn):
            raise TypeError(f"{name}={given_fn!r}: pass a function, of tokens")
    if strings and decode is None:
        raise ValueError(f"stop={strings[0]!r} is text: pass decode=text.decode too")
    if not isinstance(deadline, numbers.Real) or not deadline >= 0:  # NaN neither
        raise ValueError(f"deadline={deadline!r}: pass time.monotonic() and so many seconds")
    needed = blocks_for(len(tokens) + max_new, policy.block_size)
    if needed > min(policy.max_blocks, state.pool.num_blocks):
        known = len(tokens) if len(tokens) <= room else _length(prompt)
        count = known or len(tokens)
        needed = blocks_for(count + max_new, policy.block_size)
        raise ValueError(
            f"{count}{'' if known else ' or more'} prompt tokens and {max_new} new ones take "
            f"{needed} blocks of {policy.block_size}, but a request may have {policy.max_blocks} "
            f"and the cache has {state.pool.num_blocks}. Pass Policy(max_blocks={needed}) and a "
            "larger cache, or shorten the request"
        )
    check_settings(settings)
    if settings.logit_bias:  # as it is now, whatever becomes of the caller's dict
        settings = settings._replace(logit_bias=tuple(settings.biases.items()))
    barred = min_tokens > 0 and any(len(run) == 1 for run in ends)
    shaped = barred or grammar is not None or logprobs is not None or settings.changes_logits
    first = state.submitted if settings.seed is None else settings.seed
    jobs = []
    for i in range(n):
        request = Request(
            state.submitted + i, tokens, max_new, ends, adapter, settings, key_of(first + i),
            min_tokens, strings, decode, logprobs, grammar, priority, deadline, shaped,
        )  # fmt: skip
        jobs.append(Job(request, Tokens(tokens), 0, no_blocks(), -1))
    return dataclasses.replace(
        state, waiting=in_order(state.waiting, tuple(jobs)), submitted=state.submitted + n,
        soonest=min(state.soonest, deadline),
    )  # fmt: skip


MOST_TEXTS = 1 << 16  # of one prompt
MOST_STOPS = 1 << 20  # and tokens of one


def _at_most(most: int, name: str, given: Iterable[Any]) -> tuple[Any, ...]:
    """What an iterable gives, which may have no end.

    Raises:
        ValueError: more than so many.
    """
    found = tuple(itertools.islice(given, most + 1))
    if len(found) > most:
        raise ValueError(f"{name} has more than {most}: pass fewer")
    return found


def _brief(token: int) -> str:
    """A token that is none; of thousands of digits Python would make no text."""
    bits = token.bit_length()
    return str(token) if bits < 128 else f"a number of {bits} bits"


def _length(prompt: Any) -> int | None:
    """How many tokens a prompt has, where it says so."""
    try:
        return len(prompt)
    except (TypeError, OverflowError):
        return None


def run_of(stop: Sequence[int] | int) -> tuple[int, ...]:
    """A stop as a run of tokens.

    Raises:
        TypeError: something in it is no whole number.
    """
    try:
        return (whole("stop", stop) if isinstance(stop, bool) else operator.index(stop),)  # type: ignore[arg-type]
    except TypeError:
        run = _at_most(MOST_STOPS, "a stop", stop) if hasattr(stop, "__iter__") else (stop,)
        return tuple(whole("stop", token) for token in run)
