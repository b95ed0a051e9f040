"""What one trace has refused so far. The trace owns the list; no `except` of forward's hides it.

The first refusal is raised where it is found, and once more at the end. `fg.check` wants all of
them: there nothing is raised, and the trace goes on with a stand-in value, of the right type and no
more.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fngraph.core.where import user_line
from fngraph.errors import (
    BranchError,
    FnGraphError,
    HostFieldError,
    HostSyncError,
    OperatorError,
    PurityError,
)
from fngraph.torch_facts.names import tree_map

# ruff: noqa: ISC004
_NUMBERS = ("SymInt", "SymBool", "SymFloat", "PrintMethodNotImplementedError")
_HOST = ("FakeTensor.__format__", ".numpy()", "data is not allocated", "Cannot access data pointer")
_DEVICES = ("FakeTensor Device Propagation", "FakeTensorDeviceMismatch", "on the same device")
_MEMORY = ("with symbolic sizes/strides", "Mixing fake modes", "FakeTensor", "UntypedStorage")
_OPS = ("SparseTensorImpl", "NestedTensorImpl", "symbolically trace a dynamo-optimized", "MKLDNN")
_KNOWN: list[tuple[tuple[str, ...], type[PurityError], str]] = [
    (_NUMBERS, BranchError, "needs the number of tokens or requests as a number. Keep it symbolic: "
     "torch.arange(x.shape[0], device=x.device)"),
    (_HOST, HostSyncError, "takes a tensor to the host, where a graph would freeze it. Stay in "
     "torch: torch.where(condition, a, b)"),
    (_DEVICES, OperatorError, "has tensors of two devices in one op, which fails without a trace "
     "too. Make them where the others are: torch.ones(n, device=x.device), y.to(x.device)"),
    (_MEMORY, PurityError, "looks at the memory behind a tensor, or copies it other than by an op. "
     "Stay with tensors: x.clone(), x.shape"),
    (("HiddenHostField",), HostFieldError, "reads a host field, which a graph would freeze. Read "
     "the counts from a staged leaf that holds them"),
    (("DynamicOutputShapeException",), HostSyncError, "calls an op whose result has a shape that "
     "depends on values, so that the host would have to wait for them. Call it outside of forward, "
     "or use ops whose shapes follow from those of their arguments"),
    (_OPS, OperatorError, "calls what a graph cannot hold. Call it outside, or use ops on plain "
     "tensors and no torch.compile inside"),
]  # fmt: skip


TOLD = "_fngraph_told"
"""An attribute of an error of torch's: what is to be told of it if `forward` does not catch it, and
what the call was given."""
_AGAIN = 300
"""How often one refusal may come before a report ends; a model has fewer layers."""


class Refusals:
    """Errors in the order of the trace.

    Args:
        go_on: note errors and raise none.
    """

    def __init__(self, go_on: bool = False) -> None:
        self.go_on = go_on
        self.errors: list[FnGraphError] = []
        self.seen: Counter[str] = Counter()
        self.symbols: Any = None  # knows torch's names of T and R
        self.own_names: Callable[[str], str] = str  # puts the caller's into advice

    def __call__(self, error: FnGraphError) -> None:
        """Note `error`, and raise it unless the trace is to go on."""
        text = str(error) if self.symbols is None else self.symbols.spell(str(error))
        error.args = (self.own_names(text),)
        self.errors.append(error)
        if not self.go_on:
            raise error
        self.seen[error.args[0]] += 1
        if self.seen[error.args[0]] == _AGAIN:  # with a stand-in value it may never end
            line = error.args[0].partition(": ")[0]
            self.errors.append(
                PurityError(
                    f"forward: the report ends here, since {line} has come {_AGAIN} times, as it "
                    "does where a loop goes on for as long as a tensor's value says so: that is "
                    "fg.while_loop"
                )
            )
            raise self.errors[-1]

    def told(self, error: FnGraphError) -> None:
        """Note `error` if the trace is to go on; else raise it, as torch would at a run: `forward`
        may catch it, and go on."""
        if self.go_on:
            self(error)
            return
        error.args = (str(error) if self.symbols is None else self.symbols.spell(str(error)),)
        raise error

    @contextlib.contextmanager
    def catching(self) -> Iterator[None]:
        """Note what a check raises, and go past that check if the trace is to go on."""
        try:
            yield
        except FnGraphError as error:
            if not any(error is known for known in self.errors):
                self(error.with_traceback(None))
            elif not self.go_on:
                raise

    def raise_first(self) -> None:
        """Raise the first refusal, which forward may have swallowed."""
        if self.errors and not self.go_on:
            raise self.errors[0].with_traceback(None) from None

    def let_go(self) -> None:
        """Forget what is about to be raised: errors and frames would hold each other, and with them
        the caller's weights, until the collector next looks."""
        if not self.go_on:
            self.errors.clear()


def explained(error: Exception, refuse: Refusals) -> Exception:
    """What to raise for an exception that came out of `forward` while it was traced.

    Our own come without torch's thirty frames. What torch says of fakes and symbols, and of what an
    op was given, becomes a typed error; anything else is the user's, with a note of the line. Where
    the trace was to go on, it becomes the report's last entry.
    """
    line = user_line(error.__traceback__)
    if isinstance(error, FnGraphError):
        return error.with_traceback(None)
    if _is_mistake(error):
        _speak_of_tensors(error)
    said = str(error).strip().splitlines()[:1]
    text = refuse.symbols.spell(": ".join([type(error).__name__, *said]))
    if (known := known_words(error, text)) is not None:
        kind, why = known
        return kind(f"{line}: forward {why}. ({text})")
    if "is invalid for input of size" in text and refuse.symbols.spell(str(error)) != str(error):
        return BranchError(
            f"{line}: forward reshapes by sizes that not every batch has. Keep a dim that is made "
            f"of T or R as it is, x.view(x.shape[0], -1), or unflatten one that is not. ({text})"
        )
    told, given = map(refuse.symbols.spell, getattr(error, TOLD, ("", "")))
    if told and isinstance(error, RuntimeError | ValueError):
        rest = ". What comes after it was not checked" if refuse.go_on else ""
        return OperatorError(told + rest)
    if refuse.go_on:
        return PurityError(
            f"{line}: forward ends here with {text}, so what comes after it was not checked"
        )
    names = ", ".join(f"{symbol} is {letter}" for symbol, letter in refuse.symbols.letters.items())
    error.add_note(f"while fngraph traced forward, at {line}; {names}")
    if given:  # Python's own kinds of error stay those
        error.add_note(given)
    return error


def _is_mistake(error: Exception) -> bool:
    """Whether Python, or how torch reads arguments, would complain of a tensor with memory too."""
    if isinstance(error, AttributeError):
        return isinstance(error.obj, torch.Tensor) and not hasattr(torch.Tensor, str(error.name))
    return isinstance(error, TypeError) and "__torch_" not in str(error)


def _speak_of_tensors(error: Exception) -> None:
    """Name tensors as the caller knows them: he has none that is fake."""
    error.args = tuple(
        x.replace("FakeTensor", "Tensor") if isinstance(x, str) else x for x in error.args
    )


def known_words(error: Exception, text: str) -> tuple[type[PurityError], str] | None:
    for words, kind, why in _KNOWN:
        if any(word in text for word in words) and not isinstance(error, AssertionError):
            return kind, why
    return None


def any_scalar(tensor: torch.Tensor) -> Any:
    """What `.item()` might give."""
    if tensor.dtype is torch.bool:
        return True
    return 1j if tensor.is_complex() else 1.0 if tensor.is_floating_point() else 1


def any_array(tensor: torch.Tensor) -> Any:
    """What `.numpy()` might give."""
    import numpy

    return numpy.full([example_of(n) for n in tensor.shape], any_scalar(tensor))


def example_of(size: Any) -> int:
    """A size as the number that it is in the example; 2 where it depends on values."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return 2 if hint is None else int(hint)


def any_shape(result: Any) -> Any:
    """Fresh tensors in place of those whose shapes depend on values."""
    return tree_map(
        lambda x: x.new_empty([example_of(n) for n in x.shape]) if torch.is_tensor(x) else x, result
    )
