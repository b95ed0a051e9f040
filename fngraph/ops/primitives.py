"""A primitive as users call it: `fg.ops.attention(...)`, and `fg.ops.attention.backends()`.

A primitive: one opaque op in the traced graph, with several backends, where PIECEWISE cuts.

A primitive writes into tensors that it is given (its `out` and, say, a KV cache) and returns
nothing. So its output has a fixed address in every mode, and a backend is a plain function.

Words: `run` is what a backend does on the device; `support` is the largest class of batches that
one captured graph of it may serve; `supports` says why a configuration cannot be run at all.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, NoReturn, ParamSpec, TypeVar

import torch

from fngraph.core import HostBounds, Support
from fngraph.core.text import did_you_mean, table
from fngraph.core.where import user_line
from fngraph.errors import BackendError, TransformError
from fngraph.ops.backend import Backend
from fngraph.ops.transforms import is_transformed
from fngraph.torch_facts.names import BelowAutograd

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


LIBRARY = torch.library.Library("fngraph", "FRAGMENT")


@dataclasses.dataclass(frozen=True, slots=True)
class Primitive:
    """An opaque op and the backends that can run it.

    Attributes:
        name: of the op in the `fngraph` library, and of the key in `backends=`.
        op: the overload that appears in traced graphs.
        configure: the op's arguments (tensors or fakes) to a hashable configuration.
        group: the op's flat arguments to those of a backend's `run`.
        options: the op's arguments to more of them, by name; those that are not asked for are left
            out, so that a backend without them can run.
        backends: by name; the first one is the definition, which runs every configuration.
        null_slots: the argument that says where it writes, -1 for nowhere; None: it writes `out`
            alone, or does not say.
    """

    name: str
    op: Any
    configure: Callable[..., Any]
    group: Callable[[tuple[Any, ...]], tuple[Any, ...]]
    options: Callable[[tuple[Any, ...]], dict[str, Any]]
    backends: dict[str, Backend]
    null_slots: str | None = None
    _suited: dict[Any, Backend] = dataclasses.field(default_factory=dict, repr=False)

    def bind(
        self, backend: Backend, args: tuple[Any, ...], config: Any, **plan: Any
    ) -> functools.partial[None]:
        """The call of a backend over these arguments of the op, as yet without `host=`."""
        options = self.options(args) | plan
        return functools.partial(backend.run, *self.group(args), config=config, **options)

    def call(
        self, backend: Backend, args: tuple[Any, ...], config: Any, host: HostBounds | None,
        **plan: Any,
    ) -> None:  # fmt: skip
        """Run a backend on these arguments of the op.

        Raises:
            BackendError: its `run` returned something.
        """
        returned: Any = self.bind(backend, args, config, **plan)(host=host)  # type: ignore[func-returns-value]
        if returned is not None:
            backend.refuse_returned(returned)

    def suited(self, config: Any) -> Backend:
        """The backend of a configuration where none is named: a preferred one, or the first.

        Kept, since bare `forward` asks at each call, and a look for a package takes 50 us.
        """
        if config not in self._suited:
            able = (backend for backend, reason in self._preferred(config) if reason is None)
            self._suited[config] = next(able, next(iter(self.backends.values())))
        return self._suited[config]

    def passed_over(self, config: Any) -> list[str]:
        """The preferred backends that cannot run a configuration, with the reasons."""
        return [f"{b.name}: {reason}" for b, reason in self._preferred(config) if reason]

    def _preferred(self, config: Any) -> Iterator[tuple[Backend, str | None]]:
        """Those that are preferred for a configuration, each with why it cannot run it, or None."""
        for backend in self.backends.values():
            if backend.preferred(config):
                yield backend, backend.refusal(config)

    def backend(self, name: str) -> Backend:
        """The backend called `name`.

        Raises:
            BackendError: no such backend; lists those there are and the nearest name.
        """
        if name not in self.backends:
            shipped = [repr(b.name) for b in self.backends.values() if b.shipped]
            raise BackendError(
                f"primitive {self.name!r} has no backend {name!r}; "
                f"there are {', '.join(shipped)}.{did_you_mean(name, self.backends)}"
            )
        return self.backends[name]

    def register(self, *backends: Backend) -> None:
        """Make backends known by name; one of the same name is replaced.

        Raises:
            BackendError: what is passed is no `Backend`, has the name of the definition, or names
                an option or a leaf that the primitive does not have.
        """
        leaves = [a.name for a in self.op._schema.arguments if str(a.type) == "Tensor"]
        definition = next(iter(self.backends.values()))
        for backend in backends:
            if not isinstance(backend, Backend):
                named = getattr(backend, "__name__", "mine")
                raise BackendError(
                    f"register({backend!r}): pass a fg.ops.Backend, "
                    f"fg.ops.Backend({named!r}, run, support=lambda config: fg.Support.NEVER)"
                )
            if backend.name == definition.name and backend is not definition:
                raise BackendError(
                    f"register: {backend.name!r} is the definition of {self.name}, to which the "
                    f"others are held. Register yours by another name: fg.ops.Backend('mine', ...)"
                )
            if backend.shipped:
                backend.check_names(self.name, options=definition.options, leaves=leaves)
        self.backends.update({backend.name: backend for backend in backends})
        self._suited.clear()

    def function(self, fn: Callable[P, R]) -> Function[P, R]:
        """A decorator: the function that users call, which can also tell of the backends."""
        return Function(self, fn)

    def __repr__(self) -> str:
        return f"Primitive({self.name!r}, backends={list(self.backends)})"


PRIMITIVES: dict[str, Primitive] = {}  # by op name, "fngraph::attention"


def define(
    name: str,
    schema: str,
    *,
    configure: Callable[..., Any],
    default: Backend,
    group: Callable[[tuple[Any, ...]], tuple[Any, ...]] = tuple,
    options: Callable[[tuple[Any, ...]], dict[str, Any]] = lambda args: {},
    null_slots: str | None = None,
) -> Primitive:
    """Make the op `fngraph::name` with `schema` (its written arguments marked) and register it.

    Called outside a graphified function, the op runs what is `suited`, as a graphified one does
    where no backend is named. It has no rule for gradients or `vmap`, and says so where one is
    needed: torch's own fallback would make it silently constant.
    """
    LIBRARY.define(f"{name}{schema} -> ()")
    op = getattr(torch.ops.fngraph, name).default

    def eager(*args: Any) -> None:
        config = configure(*args)
        made.call(made.suited(config), args, config, None)

    def refuse_gradients(*args: Any) -> None:
        if is_transformed(*args):
            refuse_transform(name)
        with BelowAutograd():
            op(*args)

    LIBRARY.impl(name, eager, "CompositeExplicitAutograd")
    LIBRARY.impl(name, refuse_gradients, "Autograd")
    LIBRARY.impl(name, lambda *args: refuse_transform(name), "FuncTorchBatched")
    torch.library.register_fake(f"fngraph::{name}", lambda *args: None, lib=LIBRARY)
    backends = {default.name: default}
    made = Primitive(name, op, configure, group, options, backends, null_slots)
    PRIMITIVES[f"fngraph::{name}"] = made
    return made


def refuse_transform(name: str) -> NoReturn:
    """Raise because a primitive is opaque to what goes through it.

    Raises:
        TransformError: always.
    """
    raise TransformError(
        f"{user_line()}: the primitive {name} has no gradient rule and no batching rule, so its "
        "result would be silently constant. Wrap inference in torch.no_grad() or detach what goes "
        "in; else write that part in torch ops, or call the primitive outside of the transform"
    )


def primitive(name: str) -> Primitive:
    """The primitive called `name`.

    Raises:
        BackendError: there is none of that name.
    """
    try:
        return PRIMITIVES[f"fngraph::{name}"]
    except KeyError:
        known = sorted(p.name for p in PRIMITIVES.values())
        raise BackendError(f"no primitive {name!r}; there are {known}") from None
