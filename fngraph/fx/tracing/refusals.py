"""What one trace has refused so far. The trace owns the list; no `except` of forward's hides it.

The first refusal is raised where it is found, and once more at the end. `fg.check` wants all of
them: there nothing is raised, and the trace goes on with a stand-in value, of the right type and no
more.
"""

from __future__ import annotations

import contextlib
import math
import warnings
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
from fngraph.fx.nodes import SIZES
from fngraph.torch_facts.names import (
    are_transforms_active,
    tree_leaves,
    tree_map,
    without_modes,
)
from fngraph.torch_facts.tracing import no_python_dispatcher

# ruff: noqa: ISC004
_NUMBERS = ("SymInt", "SymBool", "SymFloat", "PrintMethodNotImplementedError")
_HOST = ("FakeTensor.__format__", ".numpy()", "data is not allocated", "Cannot access data pointer")
_DEVICES = ("FakeTensor Device Propagation", "FakeTensorDeviceMismatch", "on the same device")
_MEMORY = ("with symbolic sizes/strides", "Mixing fake modes", "FakeTensor", "UntypedStorage")
_OPS = ("SparseTensorImpl", "NestedTensorImpl", "symbolically trace a dynamo-optimized", "MKLDNN")
_LARGEST = 1 << 24  # elements of a call that is tried on zeros
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

    Our own come without torch's thirty frames. What torch says of fakes and symbols becomes a typed
    error; anything else is the user's, with a note of the line. Where the trace was to go on, it
    becomes the report's last entry.
    """
    line = user_line(error.__traceback__)
    if isinstance(error, FnGraphError):
        return error.with_traceback(None)
    if _is_mistake(error):
        _speak_of_tensors(error)
    said = str(error).strip().splitlines()[:1]
    text = refuse.symbols.spell(": ".join([type(error).__name__, *said]))
    if (known := _known(error, text)) is not None:
        kind, why = known
        return kind(f"{line}: forward {why}. ({text})")
    if "is invalid for input of size" in text and refuse.symbols.spell(str(error)) != str(error):
        return BranchError(
            f"{line}: forward reshapes by sizes that not every batch has. Keep a dim that is made "
            f"of T or R as it is, x.view(x.shape[0], -1), or unflatten one that is not. ({text})"
        )
    if refuse.go_on:
        return PurityError(
            f"{line}: forward ends here with {text}, so what comes after it was not checked"
        )
    names = ", ".join(f"{symbol} is {letter}" for symbol, letter in refuse.symbols.letters.items())
    error.add_note(f"while fngraph traced forward, at {line}; {names}")
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


def _known(error: Exception, text: str) -> tuple[type[PurityError], str] | None:
    for words, kind, why in _KNOWN:
        if any(word in text for word in words) and not isinstance(error, AssertionError):
            return kind, why
    return None


def check_traceable(
    error: Exception, name: str, func: Any, args: Any, kwargs: Any, refuse: Refusals
) -> None:
    """Refuse a call that torch runs, and of which its rules for fakes say that it is an error.

    Args:
        error: what the call has raised on fakes. Of one that is an error on numbers too, and of one
            that `explained` has words for, nothing is said here.
        name: what torch calls `func`.

    Raises:
        OperatorError: it runs on zeros of the same shapes.
    """
    text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    ours = isinstance(error, FnGraphError) or are_transforms_active()
    if ours or _known(error, text) is not None or not _runs_on_zeros(func, args, kwargs):
        return
    refuse(
        OperatorError(
            f"{user_line()}: forward calls {name}, which torch runs but cannot trace ({text}). "
            "Write it with other ops or dtypes, x[mask.bool()] for a mask of bytes; or call it "
            "outside"
        )
    )


def _runs_on_zeros(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call gives a result of zeros in place of its tensors, on the CPU."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    if sum(math.prod(map(_example, x.shape)) for x in tensors) > _LARGEST:
        return False

    def zeros(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            return torch.zeros([_example(n) for n in x.shape], dtype=x.dtype)
        return x.node.hint if isinstance(x, SIZES) else x

    try:
        with without_modes(), no_python_dispatcher(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch's, as an error it would be taken for one
            func(*tree_map(zeros, args), **tree_map(zeros, kwargs))
    except Exception:
        return False
    return True


def any_scalar(tensor: torch.Tensor) -> Any:
    """What `.item()` might give."""
    if tensor.dtype is torch.bool:
        return True
    return 1j if tensor.is_complex() else 1.0 if tensor.is_floating_point() else 1


def any_array(tensor: torch.Tensor) -> Any:
    """What `.numpy()` might give."""
    import numpy

    return numpy.full([_example(n) for n in tensor.shape], any_scalar(tensor))


def _example(size: Any) -> int:
    """A size as the number that it is in the example; 2 where it depends on values."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return 2 if hint is None else int(hint)


def any_shape(result: Any) -> Any:
    """Fresh tensors in place of those whose shapes depend on values."""
    return tree_map(
        lambda x: x.new_empty([_example(n) for n in x.shape]) if torch.is_tensor(x) else x, result
    )
