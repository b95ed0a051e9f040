"""A primitive: one opaque op in the traced graph, with several backends, where PIECEWISE cuts.

It writes into tensors that it is given (its `out` and, say, a KV cache) and returns nothing. So its
output has a fixed address in every mode, and a backend is a plain function.

Words: `run` is what a backend does on the device; `support` is the largest class of batches that
one captured graph of it may serve; `supports` says why a configuration cannot be run at all. Users
call a `Function`, as `fg.ops.attention(...)`, which can also tell of the backends.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, NamedTuple, NoReturn, ParamSpec, TypeVar, get_type_hints

import torch

from fngraph.core import HostBounds, Support
from fngraph.core.text import did_you_mean, expect, html, table, with_suggestions
from fngraph.core.where import user_line
from fngraph.errors import BackendError, TransformError
from fngraph.ops.backend import Backend, Bound
from fngraph.ops.transforms import is_transformed
from fngraph.torch_facts.names import BelowAutograd, parse_schema

P = ParamSpec("P")
R = TypeVar("R")


class Pages(NamedTuple):
    """Which rows of its state a primitive reads and writes, told by integer arguments.

    Attributes:
        caches: arguments of state, of as many rows along their first dim.
        rows: arguments whose numbers are such rows; below 0: none.
        slots: arguments whose numbers are row * size of the second dim + place; below 0: nowhere.
    """

    caches: tuple[str, ...]
    rows: tuple[str, ...]
    slots: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Primitive:
    """An opaque op and the backends that can run it.

    Attributes:
        name: of the op in the `fngraph` library, and of the key in `backends=`.
        op: the overload that appears in traced graphs.
        configure: the op's arguments (tensors or fakes) to a hashable configuration.
        make_args: `make_args(arguments, config, plan)`: the op's arguments as a backend gets them.
        backends: by name; the first one is the definition, which runs every configuration.
        aliases: names by which others know a backend, to the one that it has here.
        null_slots: the argument that says where it writes, -1 for nowhere; None: it writes `out`
            alone, or does not say.
        offsets: the argument that says where requests begin, (R + 1,); None: there is none.
        around: `around(backend, args, host)`: runs a backend, and before or behind it what it has
            no option for; None: it runs alone.
        pages: which rows of its state it is about; None: that cannot be told, it may be any.
    """

    name: str
    op: Any
    configure: Callable[..., Any]
    make_args: Callable[[tuple[Any, ...], Any, Any], Any]
    backends: dict[str, Backend]
    null_slots: str | None = None
    offsets: str | None = None
    around: Callable[[Backend, Any, HostBounds | None], Any] | None = None
    pages: Pages | None = None
    aliases: dict[str, str] = dataclasses.field(default_factory=dict, repr=False)
    _suited: dict[Any, Backend] = dataclasses.field(default_factory=dict, repr=False)

    def bind(
        self, backend: Backend, args: tuple[Any, ...], config: Any, plan: Any = None,
        *, stay: bool = False,
    ) -> Bound:  # fmt: skip
        """The call of a backend over these arguments of the op, as yet without `host=`.

        Args:
            stay: whether it will be called again and again, with tensors that stay where they are.

        Raises:
            BackendError: it is not shipped.
        """
        if backend.run is None:
            raise BackendError(
                f"fngraph does not ship {backend.name}: its level is there to study what would be "
                f"captured. To run it, write its run(args, host) and register it: fg.ops."
                f"{self.name.upper()}.register(fg.ops.Backend({backend.name!r}, run, support))"
            )
        given = self.make_args(args, config, plan)
        if stay and backend.bind is not None:
            return backend.bind(given)
        if self.around is None:
            return functools.partial(backend.run, given)
        return functools.partial(self.around, backend, given)

    def apply(self, *args: Any) -> None:
        """Call the op with what is known to be under no transform: past the rule that refuses it.

        Of 25 arguments that rule takes as long as all that torch does besides.
        """
        if torch.compiler.is_compiling():
            self.op(*args)
            return
        with BelowAutograd():
            self.op(*args)

    def call(
        self, backend: Backend, args: tuple[Any, ...], config: Any, host: HostBounds | None,
        plan: Any = None,
    ) -> None:  # fmt: skip
        """Run a backend on these arguments of the op.

        Raises:
            BackendError: its `run` returned something, or it is not shipped.
        """
        returned: Any = self.bind(backend, args, config, plan)(host=host)  # type: ignore[func-returns-value]
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
        """The backend called `name`, here or elsewhere.

        Raises:
            BackendError: no such backend; lists those there are and the nearest name.
        """
        if name not in self.backends:
            name = self.aliases.get(name, name)
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
        definition = next(iter(self.backends.values()))
        for backend in backends:
            if not isinstance(backend, Backend):
                named = getattr(backend, "__name__", "mine")
                raise BackendError(
                    f"register({backend!r}): pass a fg.ops.Backend, "
                    f"fg.ops.Backend({named!r}, run, support=lambda config: fg.Support.NEVER)"
                )
            expect(str, "a name", BackendError, name=backend.name)
            if backend.name == definition.name and backend is not definition:
                raise BackendError(
                    f"register: {backend.name!r} is the definition of {self.name}, to which the "
                    f"others are held. Register yours by another name: fg.ops.Backend('mine', ...)"
                )
            if backend.shipped:
                backend.check_names(
                    self.name, options=definition.options, leaves=_leaves(self.op._schema)
                )
        self.backends.update({backend.name: backend for backend in backends})
        self._suited.clear()

    def unregister(self, name: str) -> None:
        """Forget a backend.

        Raises:
            BackendError: there is none of that name, or it is the definition.
        """
        found = self.backend(name)
        if found is next(iter(self.backends.values())):
            raise BackendError(f"unregister: {name!r} is the definition of {self.name}")
        del self.backends[found.name]
        self._suited.clear()

    def function(self, fn: Callable[P, R]) -> Function[P, R]:
        """A decorator: the function that users call, which can also tell of the backends."""
        return Function(self, fn)

    def __repr__(self) -> str:
        return f"Primitive({self.name!r}, backends={list(self.backends)})"


LIBRARY = torch.library.Library("fngraph", "FRAGMENT")
PRIMITIVES: dict[str, Primitive] = {}  # by op name, "fngraph::attention"


@with_suggestions
def define(
    name: str,
    schema: str,
    *,
    default: Backend,
    configure: Callable[..., Any] = lambda *args: None,
    args: type[tuple[Any, ...]] | None = None,
    null_slots: str | None = None,
    offsets: str | None = None,
    around: Callable[[Backend, Any, HostBounds | None], Any] | None = None,
    pages: Pages | None = None,
) -> Primitive:
    """Make a primitive of one's own, at which PIECEWISE cuts; `backends={name: ...}` chooses.

        def run(args, host):
            args.out.copy_(args.x * args.factor)

        scale = fg.ops.define(
            "scale", "(Tensor x, Tensor(a!) out, float factor)",
            default=fg.ops.Backend("plain", run, lambda config: fg.Support.ALWAYS),
        )
        scale.op(x, out, 2.0)  # in `forward`

    Outside of a graphified function the op runs what is `suited`, as a graphified one does where no
    backend is named. It has no rule for gradients or `vmap`, and says so where one is needed:
    torch's own fallback would make it silently constant.

    Args:
        name: of the op in the `fngraph` library.
        schema: of the op, in torch's words: what is written is marked, and nothing is returned.
        default: the definition, which runs every configuration.
        configure: the op's arguments to a hashable configuration, by which backends are chosen.
        args: the named tuple that backends get. Its fields are arguments of the op by their names,
            `config`, `plan`, or named tuples of arguments in turn, as `fg.ops.AttentionMeta`. None:
            one of all the op's arguments, `config` and `plan`.
        null_slots: the argument that says where it writes, -1 for nowhere; None: it writes `out`
            alone, or does not say. Padding must be -1 there.
        offsets: the argument that says where requests begin, (R + 1,), if there is one. Padding
            must not let them fall, as pad="stride" does not.
        around: `around(backend, args, host)`: runs a backend with what it has no option for done
            before or behind it, and returns what it returned; None: it runs alone.
        pages: which rows of its state a call reads and writes, `fg.ops.Pages(...)`, so that a copy
            of those is enough to run it a second time (`verify=`); None: it may be any.

    Raises:
        BackendError: the name is taken, the schema writes nothing or returns something, or a tensor
            of it is no field of `args`, or a field no argument.
    """
    expect(str, "", BackendError, name=name, schema=schema)
    expect(Backend, "fg.ops.Backend(...)", BackendError, default=default)
    expect(Callable, "a function", BackendError, configure=configure)
    expect((Callable, type(None)), "a function", BackendError, around=around)
    if f"fngraph::{name}" in PRIMITIVES:
        raise BackendError(
            f"define({name!r}, ...): there is such a primitive. To run it in another way register "
            f"a backend: fg.ops.primitive({name!r}).register(fg.ops.Backend(...))"
        )
    whole = f"{name}{schema}" if "->" in schema else f"{name}{schema} -> ()"
    parsed = parse_schema(f"fngraph::{whole}")
    if parsed.returns or not parsed.is_mutable:
        raise BackendError(
            f"define({name!r}, {schema!r}): a primitive writes into tensors that it is given, "
            'marked as Tensor(a!), and returns nothing. Write "(Tensor x, Tensor(a!) out)"'
        )
    default.check_names(name, options=default.options, leaves=_leaves(parsed))
    make_args = _maker(parsed, args)
    LIBRARY.define(whole)
    op = getattr(torch.ops.fngraph, name).default

    def eager(*given: Any) -> None:
        config = configure(*given)
        (device, *_) = (x.device.type for x in given if isinstance(x, torch.Tensor))
        if device == "meta" or not torch.is_autocast_enabled(device):
            return made.call(made.suited(config), given, config, None)
        with torch.autocast(device, enabled=False):  # as in a graph: it is of its tensors' dtypes
            made.call(made.suited(config), given, config, None)

    def refuse_gradients(*given: Any) -> None:
        if is_transformed(*given):
            refuse_transform(name)
        with BelowAutograd():
            op(*given)

    LIBRARY.impl(name, eager, "CompositeExplicitAutograd")
    LIBRARY.impl(name, refuse_gradients, "Autograd")
    LIBRARY.impl(name, lambda *given: refuse_transform(name), "FuncTorchBatched")
    torch.library.register_fake(f"fngraph::{name}", lambda *given: None, lib=LIBRARY)
    backends = {default.name: default}
    made = Primitive(name, op, configure, make_args, backends, null_slots, offsets, around, pages)
    PRIMITIVES[f"fngraph::{name}"] = made
    return made


def _leaves(schema: torch.FunctionSchema) -> list[str]:
    """Arguments that a plan may read: tensors that are always there."""
    return [a.name for a in schema.arguments if str(a.type) == "Tensor"]


def _maker(
    schema: torch.FunctionSchema, given: type[Any] | None
) -> Callable[[tuple[Any, ...], Any, Any], Any]:
    """What makes a backend's named tuple of the op's arguments, a configuration and a plan.

    Raises:
        BackendError: a tensor of the schema is no field, or a field no argument.
    """
    names = [*(a.name for a in schema.arguments), "config", "plan"]
    kind: Any = given or namedtuple("Args", names)
    left = {a.name for a in schema.arguments if "Tensor" in str(a.type)}

    def place(name: str) -> int:
        if name not in names:
            raise BackendError(
                f"define: {schema.name} has no argument {name!r}, which {kind.__name__} names."
                f"{did_you_mean(name, names)}"
            )
        left.discard(name)
        return names.index(name)

    hints = {} if set(kind._fields) <= set(names) else get_type_hints(kind)
    inner = [x for x in kind._fields if x not in names and hasattr(hints.get(x), "_fields")]
    makers = [(hints[x]._make, _picker(map(place, hints[x]._fields))) for x in inner]
    pick = _picker(len(names) + inner.index(x) if x in inner else place(x) for x in kind._fields)
    if left:
        raise BackendError(
            f"define: {schema.name} has the tensors {', '.join(sorted(left))}, which no field of "
            f"{kind.__name__} names"
        )

    def make_args(args: tuple[Any, ...], config: Any, plan: Any) -> Any:
        given = (*args, config, plan)
        return kind._make(pick((*given, *[make(of(given)) for make, of in makers])))

    return make_args


def _picker(places: Iterable[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """What takes the items at `places` out of a tuple."""
    first, *more = places
    return operator.itemgetter(first, *more) if more else lambda given: (given[first],)


def primitive(name: str) -> Primitive:
    """The primitive called `name`.

    Raises:
        BackendError: there is none of that name.
    """
    try:
        return PRIMITIVES[f"fngraph::{name}"]
    except KeyError:
        known = sorted(p.name for p in PRIMITIVES.values())
        near = did_you_mean(name, known)
        raise BackendError(f"no primitive {name!r}; there are {', '.join(known)}.{near}") from None


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

    def _repr_html_(self) -> str:
        return html(self.as_text())


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
