"""Trace a function over flat leaves to an fx graph, with only T and R symbolic.

The example has no data: it is made of fake tensors, from the leaves' specs. What may come out is
tensors of forward's own, with sizes that can be evaluated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fngraph.core import Dim, Limits
from fngraph.core.trees import paths
from fngraph.errors import (
    ClosureError,
    FieldError,
    OperatorError,
    OutputError,
    PurityError,
    RandomError,
)
from fngraph.fx.generators import Generators, drawn
from fngraph.fx.leaves import Leaf, Role, place
from fngraph.fx.nodes import is_loop, line_of, results_of
from fngraph.fx.schemas import is_plain
from fngraph.fx.tracing.api import CallsMode, rebound
from fngraph.fx.tracing.assumptions import Assumption, implied, lettered
from fngraph.fx.tracing.constants import hoist
from fngraph.fx.tracing.outside import Made
from fngraph.fx.tracing.purity import PurityMode, donated_with
from fngraph.fx.tracing.refusals import Refusals, explained
from fngraph.fx.tracing.streams import Streams
from fngraph.fx.tracing.symbols import Symbols, symbolic_zeros
from fngraph.torch_facts.memory import storage_key
from fngraph.torch_facts.tracing import (
    Fakes,
    FakeTensor,
    enable_python_dispatcher,
    get_proxy_mode,
    has_proxy_slot,
    in_given_order,
    make_fx,
    under_compile,
    unlogged,
)


@dataclasses.dataclass(frozen=True)
class Graph:
    """A traced function.

    Attributes:
        gm: its graph. Placeholders are the leaves in order; `meta["val"]` holds fakes.
        letters: sympy symbol to letter, {s0: "T", s1: "R"}.
        constants: tensors made from literals inside the function, by node name, in order.
        assumptions: what the trace assumed of T and R.
        inlined: (name, user's line) of each primitive that a gradient or a transform went through,
            so that its plain ops are in the graph; see `fngraph.ops.transforms`.
        streams: user's lines that go to another stream, which the graph does not.
    """

    gm: fx.GraphModule
    letters: dict[Any, str]
    constants: dict[str, torch.Tensor]
    assumptions: tuple[Assumption, ...]
    inlined: tuple[tuple[str, str], ...]
    streams: tuple[str, ...] = ()

    def text(self, size: Any) -> str:
        """A fake tensor's size in T and R, as sympy prints it."""
        return str(size) if isinstance(size, int) else str(lettered(size.node.expr, self.letters))

    def dim(self, size: Any) -> Dim:
        """A fake tensor's size as an expression that can be evaluated.

        Raises:
            FieldError: one that is not a sum of products of T, R and ints.
        """
        return Dim(self.text(size))

    def same_as(self, other: Graph) -> bool:
        """Whether two traces compute the same: ops, arguments, dtypes, constants, assumptions."""
        return _compared(self) == _compared(other) and all(
            torch.equal(a, b) and a.dtype == b.dtype
            for a, b in zip(self.constants.values(), other.constants.values())
        )

    def check_limits(self, limits: Limits) -> None:
        """Raise `BranchError` unless each assumption holds for every batch within `limits`."""
        for assumption in self.assumptions:
            assumption.check(limits)


def _compared(graph: Graph) -> list[Any]:
    names = {node: i for i, node in enumerate(graph.gm.graph.nodes)}

    def plain(x: Any) -> Any:
        return fx.node.map_arg(x, lambda node: f"%{names[node]}")

    def dtype(node: fx.Node) -> str:
        unread = node.op == "placeholder" and not node.users
        return "" if unread else str(getattr(node.meta.get("val"), "dtype", ""))

    def target(node: fx.Node) -> str:
        return node.target.text if is_loop(node) else str(node.target)  # type: ignore[union-attr]

    values = [
        (node.op, target(node) if node.op == "call_function" else "", str(plain(node.args)),
         str(plain(dict(node.kwargs))), dtype(node), drawn(node))
        for node in names
    ]  # fmt: skip
    return [values, graph.assumptions, len(graph.constants)]


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
        limits: sizes of the further letters (B, ...), and the batches for which what the trace
            assumes must hold.
        found: holds the output's structure as "tree" once `flat_fn` has run.
        generators: those that may be drawn from.

    Raises:
        PurityError: see its subclasses; with the user's line.
    """
    taken = [n for leaf in leaves if leaf.spec for n in leaf.spec.shape]
    symbols = refuse.symbols = Symbols(limits, taken, refuse)
    mode = Fakes(symbols)
    with torch.inference_mode(False), mode:
        fakes = [leaf.fake({**limits.dims, **symbols.sizes}) for leaf in leaves]
    owners = {storage_key(fake): leaf for fake, leaf in zip(fakes, leaves)}
    made, streams = Made(fakes, leaves), Streams(refuse)

    def traced(*flat: torch.Tensor) -> list[Any]:
        calls = CallsMode(owners, refuse, made)
        purity = PurityMode(owners, symbols, refuse, calls, made, streams, generators)
        with purity, calls, streams.watched():
            places = [place(x) for x in flat]
            outputs = flat_fn(list(flat))
            purity.arrays.check(refuse)
        for x, before, leaf in zip(flat, places, leaves):
            if place(x) != before and not refuse.errors:
                refuse(rebound("forward", ".data =, set_, resize_", leaf.path))
        return _check_values(outputs, paths(found["tree"], "output"), refuse)

    with contextlib.closing(made):
        with torch.inference_mode(False), mode, fx.traceback.preserve_node_meta(), under_compile():
            with (
                unlogged(), enable_python_dispatcher(), symbolic_zeros(), in_given_order(),
                _no_python_random(refuse),
            ):  # fmt: skip
                # the dispatcher, because F.pad with a symbolic size crashes without
                try:
                    gm = make_fx(traced)(*fakes)
                except Exception as error:
                    refuse.raise_first()
                    raise explained(error, refuse) from None
        refuse.raise_first()
        symbols.check_fixed("forward")
        del fakes
        made.check(refuse)
    silent = dict.fromkeys(implied(gm, symbols.letters))
    for assumption in silent:
        with refuse.catching():
            assumption.check(limits)
    assumptions = tuple(dict.fromkeys((*symbols.assumed, *silent)))
    lines = tuple(dict.fromkeys(streams.lines))
    graph = Graph(gm, symbols.letters, hoist(gm), assumptions, _inlined(gm), lines)
    results, names = results_of(gm.graph), paths(found["tree"], "output")
    _check_owned(results, names, owners, refuse)
    _check_dims(results, names, graph.dim, refuse)
    return graph


def _check_values(outputs: Sequence[Any], paths: Sequence[str], refuse: Refusals) -> list[Any]:
    """Refuse output leaves that are not tensors that `forward` computed; the rest as they are.

    Raises:
        OutputError: something other than a tensor. ClosureError: a tensor from outside.
    """
    mode: Any = get_proxy_mode()
    checked = []
    for path, value in zip(paths, outputs):
        error: PurityError | None = None
        if not isinstance(value, torch.Tensor):
            error = OutputError(
                f"forward returns {path} = {_brief(value)}, which a graph would freeze. "
                f"{_instead_of(value)}"
            )
        elif not isinstance(value, FakeTensor):
            error = ClosureError(
                f"forward returns {path}, {tuple(value.shape)} {value.dtype}, which was not passed "
                "to it. Make it an argument, and return a copy of it: x.clone()"
            )
        elif not is_plain(value):
            error = OperatorError(
                f"forward returns {path}, which has no plain memory ({value.layout}, "
                f"{value.dtype}). Return plain tensors: x.to_dense(), x.dequantize()"
            )
        elif not has_proxy_slot(value, mode.tracer):
            error = PurityError(
                f"forward returns {path}, which no op of this trace has made: another thread has, "
                "or another trace, or a function of a loop has made it, and its turn is over. "
                "Compute it in forward, on its own thread; return from a loop what is to last"
            )
        if error is not None:
            refuse(error)
            value = torch.zeros(())
        checked.append(value)
    return checked


def _brief(value: Any) -> str:
    if inspect.isgenerator(value) or inspect.iscoroutine(value):
        return f"a {type(value).__name__}: forward is written with yield or async"
    return f"{value!r} ({type(value).__name__})"


def _instead_of(value: Any) -> str:
    if type(value).__name__.endswith("Cache"):  # of keys and values, as transformers calls them
        return "Call the model with use_cache=False, or return its tensors alone: out.logits"
    return "Return tensors only; sizes are known from batch.spec outside"


def _check_owned(
    results: Sequence[fx.Node], paths: Sequence[str], owners: Mapping[int, Leaf], refuse: Refusals
) -> None:
    """Refuse an output that is memory of an argument that was not donated.

    Raises:
        OutputError: naming the argument.
    """
    for node, path in zip(results, paths):
        leaf = owners.get(storage_key(node.meta["val"]))
        if leaf is not None and leaf.role is not Role.DONATED:
            if leaf.role is Role.STAGED:
                why = "the next step rewrites its memory. Return a copy: x.clone()"
            else:
                why = (
                    "writing to the result would write to it. If it is state, donate it: "
                    f"fg.graphify(..., donate={donated_with(leaf, owners)}); else return a copy: "
                    "x.clone()"
                )
            refuse(
                OutputError(
                    f"forward returns {leaf.path} itself or a view of it as {path}. It is "
                    f"{leaf.role.value}: {why}"
                )
            )


def _check_dims(
    results: Sequence[fx.Node], paths: Sequence[str], dim: Any, refuse: Refusals
) -> None:
    """Refuse an output with a size that is not made of T, R and ints by + - * // % **.

    Raises:
        OutputError: with the line of the op that makes it.
    """
    for node, path in zip(results, paths):
        for size in node.meta["val"].shape:
            try:
                dim(size)
            except FieldError:
                refuse(
                    OutputError(
                        f"{line_of(node)}: {path} has the dim {size}, and a size is made of T, R "
                        "and ints with + - * // % ** only. Compute with one of these, and slice "
                        "outside"
                    )
                )


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
