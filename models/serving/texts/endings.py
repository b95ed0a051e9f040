"""Where a request ends: the tokens of a step up to its stop or its length, and their text."""

from __future__ import annotations

import numpy as np

from fngraph.models.serving.requests import Job
from fngraph.models.serving.texts.detokenize import Reading, read


def cut(job: Job, new: tuple[int, ...]) -> tuple[tuple[int, ...], str | None]:
    """The new tokens up to where the request ends, and why it does."""
    request = job.request
    had = len(job.tokens) - len(request.prompt)
    new = new[: request.max_new - had]
    if request.stop:
        longest = max(map(len, request.stop))
        text = (*job.tokens.view(max(len(request.prompt), len(job.tokens) - longest + 1)), *new)
        for count in range(max(1, request.min_tokens + 1 - had), len(new) + 1):
            if _stop(job, text[: len(text) - len(new) + count]):
                return new[:count], "stop"
    return new, "length" if had + len(new) == request.max_new else None


def read_on(job: Job, new: tuple[int, ...]) -> tuple[tuple[int, ...], str | None, str, Reading]:
    """The same where the request has `decode`: also what of its text is certain now, how far it is.

    It goes token by token, so that it does not matter how many come at once. Where `decode` raises,
    the request ends there, and no other with it.
    """
    request, reading, said = job.request, job.reading, ""
    assert request.decode is not None
    had = len(job.tokens) - len(request.prompt)
    new = new[: request.max_new - had]
    all_ = np.concatenate([job.tokens.view(len(request.prompt)), np.asarray(new, np.int64)])
    longest = max(map(len, request.stop), default=0)
    for count in range(had + 1, had + len(new) + 1):
        heeded = count > request.min_tokens
        tail = tuple(all_[max(0, count - longest) : count].tolist())
        run = _stop(job, tail) if heeded else 0
        last = bool(run) or count == request.max_new
        unsure = run if last else _begun(job, tail)  # these may turn out to be a stop
        strings = request.stop_strings if heeded else ()
        try:
            reading, text, stopped = read(
                reading, all_[: count - unsure], request.decode, strings, last=last
            )
        except Exception as error:  # whatever a user's function raises is its request's alone
            why = f"failed: its decode raised {type(error).__name__}: {error}"
            return new[: count - had], why, said, reading
        said += text
        if run or stopped:
            return new[: count - had], "stop", said, reading
    return new, "length" if had + len(new) == request.max_new else None, said, reading


def rest(job: Job) -> str:
    """The text that is still held back, of a request that ends here."""
    request = job.request
    if request.decode is None:
        return ""
    new = job.tokens.view(len(request.prompt))
    try:
        return read(job.reading, new, request.decode, request.stop_strings, last=True)[1]
    except Exception:  # it ends in any case
        return ""


def _stop(job: Job, text: tuple[int, ...]) -> int:
    """Tokens of the stop that a text ends with, the longest one; 0: none."""
    return max((len(run) for run in job.request.stop if text[-len(run) :] == run), default=0)


def _begun(job: Job, text: tuple[int, ...]) -> int:
    """The most tokens at the end of a text that a stop of more begins with."""
    sizes = (
        size
        for run in job.request.stop
        for size in range(min(len(run) - 1, len(text)), 0, -1)
        if text[-size:] == run[:size]
    )
    return max(sizes, default=0)
