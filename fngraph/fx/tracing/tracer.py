"""Trace a function over flat leaves to an fx graph, with only T and R symbolic.

The example has no data: it is made of fake tensors, from the leaves' specs.

What to raise for an exception that came out of `forward` while it was traced.

Our own come without torch's thirty frames. What torch says of fakes and symbols becomes a typed
error; anything else is the user's, with a note of the line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from fngraph.core import Dim, Limits
from fngraph.core.trees import paths
from fngraph.core.where import user_line
from fngraph.errors import (
    BranchError,
    FnGraphError,
    HostFieldError,
    HostSyncError,
    OperatorError,
    PurityError,
    RandomError,
)
from fngraph.fx.generators import Generators, drawn
from fngraph.fx.leaves import Leaf, place
from fngraph.fx.tracing.api import CallsMode, rebound
from fngraph.fx.tracing.constants import hoist
from fngraph.fx.tracing.outputs import check_dims, check_owned, check_values
from fngraph.fx.tracing.outside import Made
from fngraph.fx.tracing.purity import PurityMode
from fngraph.fx.tracing.refusals import Refusals
from fngraph.fx.tracing.sizes import Guard, Sizes, implied, lettered
from fngraph.fx.tracing.streams import Streams
from fngraph.fx.tracing.tangents import symbolic_zeros
from fngraph.torch_facts.memory import storage_key
from fngraph.torch_facts.tracing import (
    FakeTensorMode,
    enable_python_dispatcher,
    make_fx,
    under_compile,
)


@dataclasses.dataclass(frozen=True)
class Graph:
    """A traced function.

    Attributes:
        gm: its graph. Placeholders are the leaves in order; `meta["val"]` holds fakes.
        symbols: sympy symbol to letter, {s0: "T", s1: "R"}.
        constants: tensors made from literals inside the function, by node name, in order.
        guards: what the trace assumed of T and R.
        inlined: (name, user's line) of each primitive that a gradient or a transform went through,
            so that its plain ops are in the graph; see `fngraph.ops.transforms`.
        streams: user's lines that go to another stream, which the graph does not.
    """

    gm: fx.GraphModule
    symbols: dict[Any, str]
    constants: dict[str, torch.Tensor]
    guards: tuple[Guard, ...]
    inlined: tuple[tuple[str, str], ...]
    streams: tuple[str, ...] = ()

    def text(self, size: Any) -> str:
        """A fake tensor's size in T and R, as sympy prints it."""
        return str(size) if isinstance(size, int) else str(lettered(size.node.expr, self.symbols))

    def dim(self, size: Any) -> Dim:
        """A fake tensor's size as an expression that can be evaluated.

        Raises:
            FieldError: one that is not a sum of products of T, R and ints.
        """
        return Dim(self.text(size))

    def same_as(self, other: Graph) -> bool:
        """Whether two traces compute the same: ops, arguments, dtypes, constants and guards."""
        return _signature(self) == _signature(other) and all(
            torch.equal(a, b) and a.dtype == b.dtype
            for a, b in zip(self.constants.values(), other.constants.values())
        )

    def check_limits(self, limits: Limits) -> None:
        """Raise `BranchError` unless every guard holds for every batch within `limits`."""
        for guard in self.guards:
            guard.check(limits)


def _signature(graph: Graph) -> list[Any]:
    names = {node: i for i, node in enumerate(graph.gm.graph.nodes)}

    def plain(x: Any) -> Any:
        return fx.node.map_arg(x, lambda node: f"%{names[node]}")

    def dtype(node: fx.Node) -> str:
        unread = node.op == "placeholder" and not node.users
        return "" if unread else str(getattr(node.meta.get("val"), "dtype", ""))

    values = [
        (node.op, str(node.target) if node.op == "call_function" else "", str(plain(node.args)),
         str(plain(dict(node.kwargs))), dtype(node), drawn(node))
        for node in names
    ]  # fmt: skip
    return [values, graph.guards, len(graph.constants)]


def trace(
    flat_fn: Callable[[list[torch.Tensor]], list[Any]],
    leaves: Sequence[Leaf],
    limits: Limits,
    found: dict[str, Any],
    refuse: Refusals,
    generators: Generators = (),
) -> Graph:
    """Trace `flat_fn` over `leaves`.

    Args:
        flat_fn: leaves to output leaves.
        leaves: abstract arguments.
        limits: sizes of the further letters (B, ...) and the bounds that guards must hold for.
        found: holds the output's structure as "tree" once `flat_fn` has run.
        generators: those that may be drawn from.

    Raises:
        PurityError: see its subclasses; with the user's line.
    """
    taken = [n for leaf in leaves if leaf.spec for n in leaf.spec.shape]
    sizes = refuse.sizes = Sizes(limits, taken, refuse)
    mode = FakeTensorMode(shape_env=sizes, allow_non_fake_inputs=False)
    with torch.inference_mode(False), mode:
        fakes = [leaf.fake({**limits.dims, **sizes.letters}) for leaf in leaves]
    owners = {storage_key(fake): leaf for fake, leaf in zip(fakes, leaves)}
    made, streams = Made(fakes, leaves), Streams(refuse)

    def traced(*flat: torch.Tensor) -> list[Any]:
        calls = CallsMode(owners, refuse, made)
        purity = PurityMode(owners, sizes, refuse, calls, made, streams, generators)
        with purity, calls, streams.watched():
            places = [place(x) for x in flat]
            outputs = flat_fn(list(flat))
        for x, before, leaf in zip(flat, places, leaves):
            if place(x) != before and not refuse.errors:
                refuse(rebound("forward", ".data =, set_, resize_", leaf.path))
        return check_values(outputs, paths(found["tree"], "output"), refuse)

    with torch.inference_mode(False), mode, fx.traceback.preserve_node_meta(), under_compile():
        with enable_python_dispatcher(), symbolic_zeros(), _no_python_random(refuse):
            # the dispatcher, because F.pad with a symbolic size crashes without
            try:
                gm = make_fx(traced)(*fakes)
            except Exception as error:
                refuse.raise_first()
                raise explained(error, sizes, refuse) from None
    refuse.raise_first()
    sizes.check_fixed("forward")
    del fakes
    made.check(refuse)
    silent = dict.fromkeys(implied(gm, sizes.symbols))
    for guard in silent:
        with refuse.catching():
            guard.check(limits)
    guards = dict.fromkeys((*sizes.guards_asked, *silent))
    lines = tuple(dict.fromkeys(streams.lines))
    graph = Graph(gm, sizes.symbols, hoist(gm), tuple(guards), _inlined(gm), lines)
    (output,) = (n for n in gm.graph.nodes if n.op == "output")
    names = paths(found["tree"], "output")
    check_owned(output.args[0], names, owners, refuse)
    check_dims(output.args[0], names, graph.dim, refuse)
    return graph


def _inlined(gm: fx.GraphModule) -> tuple[tuple[str, str], ...]:
    metas = [node.meta for node in gm.graph.nodes]
    marked = [(meta.get("custom", {}).get("inlined"), meta.get("stack_trace")) for meta in metas]
    return tuple(dict.fromkeys((name, line) for name, line in marked if name and line))


@contextlib.contextmanager
def _no_python_random(refuse: Refusals) -> Iterator[None]:
    before = _random_states()
    yield
    for name, state in _random_states().items():
        if state != before.get(name, state):
            refuse(
                RandomError(
                    f"forward draws from {name}, and a graph would freeze the number. Pass it in "
                    "as a tensor"
                )
            )


def _random_states() -> dict[str, Any]:
    """Python's generator, and numpy's where somebody has loaded it."""
    numpy = sys.modules.get("numpy")
    states: dict[str, Any] = {"Python's random module": random.getstate()}
    if numpy is not None:
        states["numpy.random"] = pickle.dumps(numpy.random.get_state())
    return states


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
