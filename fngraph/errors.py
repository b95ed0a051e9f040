"""One class per broken rule, each under `FnGraphError` and the builtin a caller would expect.

Every message says what broke, where (a pytree path or the user's line), and how to mend it.
"""

from __future__ import annotations


class FnGraphError(Exception):
    """Base of every error that fngraph raises on purpose."""


# --- pure decisions (fngraph.core) ------------------------------------------------------------


class SpecError(FnGraphError, ValueError):
    """A `BatchSpec` whose counts contradict one another, or one beyond `Limits`."""


class SizesError(FnGraphError, ValueError):
    """A ladder of capture sizes that is empty, unsorted, repeated or beyond the limits."""


class ModesError(FnGraphError, ValueError):
    """An unknown mode, or modes that no backend, table or `allowed=` can serve."""


class FieldError(FnGraphError, TypeError):
    """A `fg.struct` field declared with dims, a dtype or a pad rule that make no sense."""


# --- arguments and their leaves -----------------------------------------------------------------


class TreeError(FnGraphError, TypeError):
    """Arguments whose structure, dtypes or shapes are not those that were traced, or that fit."""


class AddressError(FnGraphError, RuntimeError):
    """A bound leaf is no longer where it was when the graphs were captured."""


class AliasError(FnGraphError, ValueError):
    """A donated leaf shares memory with another leaf."""


class DonationError(FnGraphError, ValueError):
    """A donated leaf that does not come back, or comes back with another shape or dtype."""


# --- processes ----------------------------------------------------------------------------------


class RankError(FnGraphError, RuntimeError):
    """Processes that do not fit together: a mesh of another number than there are, a split that is
    not even, something that differs between them, or one that is gone.

    Attributes:
        at: the collective and the axis that it happened in, until it is said where that is.
    """

    def __init__(self, text: str, at: tuple[str, str] | None = None) -> None:
        super().__init__(text)
        self.at = at


class AbsentError(RankError):
    """A process does not come to an exchange on a board.

    Attributes:
        rank: which, of the board's.
        gave_up: whether it has said that it comes no more; else it has ended, or is late.
    """

    def __init__(self, text: str, rank: int, gave_up: bool) -> None:
        super().__init__(text)
        self.rank, self.gave_up = rank, gave_up


# --- purity of the traced function --------------------------------------------------------------


class PurityError(FnGraphError, RuntimeError):
    """`forward` did something that a graph would freeze, drop or repeat. Base of the next ones."""


class ClosureError(PurityError):
    """`forward` reads a tensor that was not passed to it."""


class HostSyncError(PurityError):
    """`forward` needs a value on the host (`.item()`, `if tensor`, a data-dependent shape)."""


class MutationError(PurityError):
    """`forward` writes into an argument that was not donated."""


class LeakError(PurityError):
    """`forward` keeps a tensor that it made, or was given, beyond the call."""


class RandomError(PurityError):
    """`forward` draws from a random number generator that is not registered, or seeds one."""


class BranchError(PurityError):
    """Python in `forward` branches on, or freezes, the number of tokens or requests."""


class RowsError(PurityError):
    """`forward` mixes rows over T or R, so that padding would reach true rows."""


class AmbientError(PurityError):
    """Ambient state of torch (autocast, default dtype, ...) that differs from the trace's, or that
    `forward` changes."""


class HostFieldError(PurityError):
    """`forward` reads a host field such as `batch.spec`."""


class OperatorError(PurityError):
    """`forward` calls an operator that a graph cannot hold, or a call that torch refuses."""


class OutputError(PurityError):
    """`forward` returns something other than tensors, or an alias of what it does not own."""


# --- primitives, capture and replay ---------------------------------------------------------------


class BackendError(FnGraphError, LookupError):
    """An unknown backend, or one that does not support the configuration."""


class TransformError(FnGraphError, NotImplementedError):
    """A gradient or a `torch.func` transform through a primitive that has no rule for it."""


class StaleError(FnGraphError, RuntimeError):
    """A borrowed result is used after a later call of its pool; seen under `guards=True`."""


class CaptureError(FnGraphError, RuntimeError):
    """A graph that could not be captured. Pool and donated state are as they were before."""


class CompileError(FnGraphError, RuntimeError):
    """A piece that Inductor cannot compile, or a size that its compiled code does not serve."""


class DifferenceError(FnGraphError, RuntimeError):
    """A verified step and bare `forward` differ, and that is to be an error. Donated leaves hold
    what the step has written.

    Attributes:
        difference: the `fg.Difference`, for `fg.bisect`.
    """

    def __init__(self, text: str, difference: object = None) -> None:
        super().__init__(text)
        self.difference = difference


class PassError(FnGraphError, ValueError):
    """A pass that is unknown, or that returned a graph which is not what it was given."""


class SleepError(FnGraphError, RuntimeError):
    """A step was called while it sleeps: `step.wake()` first."""


class PackageError(FnGraphError, ImportError):
    """A package that is not installed, and that what was asked for needs."""


# --- other people's models -----------------------------------------------------------------------


class ModelError(FnGraphError, ValueError):
    """A model of another library that cannot become a step over a paged cache; says why."""
