"""A primitive as users call it: `fg.ops.attention(...)`, and `fg.ops.attention.backends()`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, ParamSpec, TypeVar

from fngraph.core import Support
from fngraph.core.text import table
from fngraph.errors import BackendError

if TYPE_CHECKING:
    from fngraph.ops.primitive import Primitive

P = ParamSpec("P")
R = TypeVar("R")


class BackendRow(NamedTuple):
    """One backend.

    Attributes:
        level: of a plain configuration; what a batch needs for its graph to be captured.
        needs: what it takes to run it.
        usable: "yes", or why not on this machine.
    """

    backend: str
    level: Support
    needs: str
    usable: str


class Listing(tuple[BackendRow, ...]):
    """Backends of a primitive, the definition first; prints as a table."""

    def __repr__(self) -> str:
        return table(BackendRow._fields, self)

    as_text = __repr__


class Function(Generic[P, R]):
    """What users call to use a primitive."""

    def __init__(self, primitive: Primitive, fn: Callable[P, R]) -> None:
        functools.update_wrapper(self, fn)
        self.primitive, self._fn = primitive, fn

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """See the function's own docstring."""
        return self._fn(*args, **kwargs)

    def backends(self) -> Listing:
        """Every backend with its level, what it needs, and whether it is usable here: a table."""
        return Listing(
            BackendRow(b.name, b.level(None), b.needs, b.missing() or "yes")
            for b in self.primitive.backends.values()
        )

    def level(self, backend: str, config: Any = None) -> Support:
        """A backend's level, also of one that cannot be used here.

            fg.resolve("FULL", fg.ops.attention.level("FlashMLA"))

        Args:
            config: a configuration of the primitive; None: a plain one.

        Raises:
            BackendError: no such backend.
        """
        return self.primitive.backend(backend).level(config)

    def __repr__(self) -> str:
        return f"fg.ops.{self.primitive.name}"


def not_installed(module: str, package: str) -> str | None:
    """None if `module` can be imported, else how to get it."""
    from importlib.util import find_spec

    if find_spec(module) is not None:
        return None
    return f"not installed: pip install {package}"


def not_shipped(name: str) -> Callable[..., None]:
    """The `run` of a backend that is a name with a level."""

    def run(*args: Any, **kwargs: Any) -> None:
        raise BackendError(
            f"fngraph does not ship {name}: its level is there to study what would be captured. "
            f"To run it, write its run(...) and register it: "
            f"fg.ops.ATTENTION.register(fg.ops.Backend({name!r}, run, support))"
        )

    return run
