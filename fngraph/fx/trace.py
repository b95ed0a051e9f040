"""Trace a function over flat leaves to an fx graph, with only T and R symbolic.

The example has no data: fake tensors, made from the leaves' specs, in which T and R are symbols
whose hints differ, so that they never share one. `specialize_zero_one` stays on and hints are
above one: torch then records no guard at 0 or 1, and the graph serves N = 1 as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from fngraph.core import Dim, Limits
from fngraph.core.trees import paths
from fngraph.errors import BranchError, OutputError
from fngraph.fx.constants import hoist
from fngraph.fx.leaves import Leaf, Role
from fngraph.fx.purity import PurityMode, storage_key, visible_tensors

HINTS = {"T": 1361, "R": 709}  # primes, so that no model dim meets them by chance


@dataclasses.dataclass(frozen=True)
class Graph:
    """A traced function.

    Attributes:
        gm: its graph. Placeholders are the leaves in order; `meta["val"]` holds fakes.
        symbols: sympy symbol to letter, {s0: "T", s1: "R"}.
        constants: tensors made from literals inside the function, by node name, in order.
        guards: what the trace assumed of T and R, as (expression, line).
    """

    gm: fx.GraphModule
    symbols: dict[Any, str]
    constants: dict[str, torch.Tensor]
    guards: tuple[tuple[Any, str], ...]

    def dim(self, size: Any) -> Dim:
        """A fake tensor's size as an expression in T and R."""
        if isinstance(size, int):
            return Dim(str(size))
        expr = size.node.expr
        return Dim(str(expr.xreplace({s: _letter(n) for s, n in self.symbols.items()})))

    def check_limits(self, limits: Limits) -> None:
        """Raise unless every guard holds for every batch within `limits`.

        Raises:
            BranchError: with the guard and the user's line.
        """
        by_letter = {letter: symbol for symbol, letter in self.symbols.items()}
        tops = {"T": limits.max_tokens, "R": limits.max_reqs}
        grid = {k: sorted({1, 2, 3, 5, 8, HINTS[k], top // 2, top}) for k, top in tops.items()}
        for expr, line in self.guards:
            for t in grid["T"]:
                for r in grid["R"]:
                    holds = expr.subs({by_letter["T"]: t, by_letter["R"]: r})
                    if t <= tops["T"] and r <= min(t, tops["R"]) and holds == False:  # noqa: E712
                        text = expr.xreplace({s: _letter(n) for s, n in self.symbols.items()})
                        raise BranchError(
                            f"{line}: Python in forward depends on the number of tokens or "
                            f"requests: the trace took the way where {text}, which is false for "
                            f"T={t}, R={r}. Write the same computation for every size (masks, "
                            "torch.where), or lower fg.Limits to sizes for which it holds"
                        )


def _letter(name: str) -> Any:
    import sympy

    return sympy.Symbol(name)


def trace(
    flat_fn: Callable[[list[torch.Tensor]], list[Any]],
    leaves: Sequence[Leaf],
    limits: Limits,
    source: Callable[..., Any],
    found: dict[str, Any],
) -> Graph:
    """Trace `flat_fn` over `leaves`.

    Args:
        flat_fn: leaves to output leaves.
        leaves: abstract arguments.
        limits: sizes of the further letters (B, ...) and the bounds that guards must hold for.
        source: the user's function, to name the tensors that it closes over.
        found: holds the output's structure as "tree" once `flat_fn` has run.

    Raises:
        PurityError: see its subclasses; with the user's line.
    """
    env = ShapeEnv(specialize_zero_one=True, duck_shape=False)
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=False)
    sizes = {letter: _symint(env, letter, hint) for letter, hint in HINTS.items()}
    symbols = {size.node.expr: letter for letter, size in sizes.items()}
    with mode:
        fakes = [leaf.fake({**limits.dims, **sizes}) for leaf in leaves]
    owners = {storage_key(fake): leaf for fake, leaf in zip(fakes, leaves)}

    def traced(*flat: torch.Tensor) -> list[Any]:
        with PurityMode(owners, visible_tensors(source)):
            outputs = flat_fn(list(flat))
        for path, value in zip(paths(found["tree"], "output"), outputs):
            if not isinstance(value, torch.Tensor):
                raise OutputError(
                    f"forward returns {path} = {value!r}, a {type(value).__name__}, which a graph "
                    "would freeze. Return tensors only; sizes are known from batch.spec outside"
                )
        return outputs

    with torch.inference_mode(False), mode, fx.traceback.preserve_node_meta():
        with enable_python_dispatcher():  # else F.pad with a symbolic size crashes
            gm = make_fx(traced)(*fakes)
    constants = hoist(gm)
    guards = tuple((g.expr, _guard_line(g)) for g in env.guards)
    graph = Graph(gm, symbols, constants, guards)
    for symbol, value in env.replacements.items():
        if symbol in symbols:
            line = next((ln for e, ln in guards if symbol in e.free_symbols), "forward")
            raise BranchError(
                f"{line}: forward fixes the number of {_NOUN[symbols[symbol]]} to {value} "
                "(int(x.shape[0]), range(x.shape[0]), ...). Keep sizes symbolic: "
                "torch.arange(x.shape[0], device=x.device)"
            )
    graph.check_limits(limits)
    _check_outputs(gm, owners)
    return graph


_NOUN = {"T": "tokens", "R": "requests"}


def _symint(env: ShapeEnv, letter: str, hint: int) -> Any:
    source = ConstantSource(letter)
    symbol = env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
    return env.create_symintnode(symbol, hint=hint, source=source)


def _guard_line(guard: Any) -> str:
    """The user's line of a guard; torch keeps the whole stack beside it."""
    loc = guard.sloc.framework_loc
    return str(loc).strip() if loc else "forward"


def _check_outputs(gm: fx.GraphModule, owners: dict[int, Leaf]) -> None:
    (output,) = (n for n in gm.graph.nodes if n.op == "output")
    for node in output.args[0]:
        value = node.meta["val"] if isinstance(node, fx.Node) else node
        leaf = owners.get(storage_key(value)) if isinstance(value, torch.Tensor) else None
        if leaf is not None and leaf.role is not Role.DONATED:
            raise OutputError(
                f"forward returns {leaf.path} itself or a view of it, which is "
                f"{leaf.role.value}: its memory is rewritten under the caller's feet. "
                "Return a copy: x.clone()"
            )
