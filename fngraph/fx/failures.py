"""What to raise for an exception that came out of `forward` while it was traced.

Our own come without torch's thirty frames. What torch says of fakes and symbols becomes a typed
error; anything else is the user's, with a note of the line.
"""

from __future__ import annotations

from fngraph.core.where import user_line
from fngraph.errors import (
    BranchError,
    FnGraphError,
    HostFieldError,
    HostSyncError,
    OperatorError,
    PurityError,
)
from fngraph.fx.refusals import Refusals
from fngraph.fx.sizes import Sizes

_NUMBERS = ("SymInt", "SymBool", "SymFloat", "PrintMethodNotImplementedError")
_HOST = ("FakeTensor.__format__", ".numpy()", "data is not allocated", "Cannot access data pointer")
_MEMORY = ("with symbolic sizes/strides", "Mixing fake modes", "FakeTensor", "UntypedStorage")
_OPS = ("SparseTensorImpl", "NestedTensorImpl", "symbolically trace a dynamo-optimized", "MKLDNN")
# ruff: noqa: ISC004
_KNOWN: list[tuple[tuple[str, ...], type[PurityError], str]] = [
    (_NUMBERS, BranchError, "needs the number of tokens or requests as a number. Keep it symbolic: "
     "torch.arange(x.shape[0], device=x.device)"),
    (_HOST, HostSyncError, "takes a tensor to the host, where a graph would freeze it. Stay in "
     "torch: torch.where(condition, a, b)"),
    (_MEMORY, PurityError, "looks at the memory behind a tensor, or copies it other than by an op. "
     "Stay with tensors: x.clone(), x.shape"),
    (("HiddenHostField",), HostFieldError, "reads a host field, which a graph would freeze. Read "
     "the counts from a staged leaf, e.g. batch.seq_lens"),
    (_OPS, OperatorError, "calls what a graph cannot hold. Call it outside, or use ops on plain "
     "tensors and no torch.compile inside"),
]  # fmt: skip


def explained(error: Exception, sizes: Sizes, refuse: Refusals) -> Exception:
    """What to raise for `error`; where the trace was to go on, the report's last entry."""
    line = user_line(error.__traceback__)
    if isinstance(error, FnGraphError):
        return error.with_traceback(None)
    text = sizes.spell(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
                       if str(error).strip() else type(error).__name__)  # fmt: skip
    for words, kind, why in _KNOWN:
        if any(word in text for word in words) and not isinstance(error, AssertionError):
            return kind(f"{line}: forward {why}. ({text})")
    if refuse.go_on:
        return PurityError(
            f"{line}: forward ends here with {text}, so what comes after it was not checked"
        )
    names = ", ".join(f"{symbol} is {letter}" for symbol, letter in sizes.symbols.items())
    error.add_note(f"while fngraph traced forward, at {line}; {names}")
    return error
