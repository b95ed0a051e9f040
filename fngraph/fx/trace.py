"""Trace a function over flat leaves to an fx graph, with only T and R symbolic.

The example has no data: fake tensors, made from the leaves' specs, in which T and R are symbols
whose hints differ, so that they never share one. `specialize_zero_one` stays on and hints are
above one: torch then records no guard at 0 or 1, and the graph serves N = 1 as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from fngraph.core import Dim, Limits
from fngraph.core.trees import paths
from fngraph.errors import HostSyncError, OutputError, user_line
from fngraph.fx.constants import hoist
from fngraph.fx.guards import Guard, check_fixed
from fngraph.fx.leaves import Leaf, Role
from fngraph.fx.purity import PurityMode, storage_key, visible_tensors

# Example sizes. Small, so that a table of some length is not clamped where Limits allow less than
# it; primes that are no dim of a leaf, so that nothing meets them by chance.
_PRIMES = (23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103, 107)


@dataclasses.dataclass(frozen=True)
class Graph:
    """A traced function.

    Attributes:
        gm: its graph. Placeholders are the leaves in order; `meta["val"]` holds fakes.
        symbols: sympy symbol to letter, {s0: "T", s1: "R"}.
        constants: tensors made from literals inside the function, by node name, in order.
        guards: what the trace assumed of T and R.
    """

    gm: fx.GraphModule
    symbols: dict[Any, str]
    constants: dict[str, torch.Tensor]
    guards: tuple[Guard, ...]

    def dim(self, size: Any) -> Dim:
        """A fake tensor's size as an expression in T and R."""
        if isinstance(size, int):
            return Dim(str(size))
        return Dim(str(lettered(size.node.expr, self.symbols)))

    def check_limits(self, limits: Limits) -> None:
        """Raise `BranchError` unless every guard holds for every batch within `limits`."""
        for guard in self.guards:
            guard.check(limits)


def lettered(expr: Any, symbols: Mapping[Any, str]) -> Any:
    """A sympy expression with T and R for torch's own symbols."""
    return expr.xreplace({symbol: sympy.Symbol(letter) for symbol, letter in symbols.items()})


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
    sizes = {letter: _symint(env, letter, hint) for letter, hint in _hints(leaves).items()}
    symbols = {size.node.expr: letter for letter, size in sizes.items()}
    with torch.inference_mode(False), mode:
        fakes = [leaf.fake({**limits.dims, **sizes}) for leaf in leaves]
    owners = {storage_key(fake): leaf for fake, leaf in zip(fakes, leaves)}

    purity = PurityMode(owners, visible_tensors(source), env)

    def traced(*flat: torch.Tensor) -> list[Any]:
        with purity:
            outputs = flat_fn(list(flat))
        _check_tensors(outputs, paths(found["tree"], "output"))
        return outputs

    with torch.inference_mode(False), mode, fx.traceback.preserve_node_meta():
        with enable_python_dispatcher():  # else F.pad with a symbolic size crashes
            try:
                gm = make_fx(traced)(*fakes)
            except RuntimeError as error:
                if ".numpy()" in str(error):  # fakes refuse it, but do not say why
                    raise HostSyncError(
                        f"{user_line(error.__traceback__)}: forward takes a tensor to the host "
                        "with .numpy(), where a graph would freeze it. Stay in torch"
                    ) from error
                raise
    constants = hoist(gm)
    guards = tuple(
        Guard(lettered(guard.expr, symbols), purity.line_of(i, guard))
        for i, guard in enumerate(env.guards)
    )
    fixed = [guard.line for guard, g in zip(guards, env.guards) if g.expr.func is sympy.Eq]
    check_fixed(env.replacements, symbols, (fixed or ["forward"])[-1])
    graph = Graph(gm, symbols, constants, guards)
    graph.check_limits(limits)
    _check_outputs(gm, owners)
    return graph


def _hints(leaves: Sequence[Leaf]) -> dict[str, int]:
    met = {size for leaf in leaves if leaf.spec is not None for size in leaf.spec.shape}
    free = [p for p in _PRIMES if p not in met]
    return {"T": free[1], "R": free[0]}  # different, so that T and R never share a symbol


def _symint(env: ShapeEnv, letter: str, hint: int) -> Any:
    source = ConstantSource(letter)
    symbol = env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
    return env.create_symintnode(symbol, hint=hint, source=source)


def _check_tensors(outputs: Sequence[Any], names: Sequence[str]) -> None:
    for path, value in zip(names, outputs):
        if not isinstance(value, torch.Tensor):
            raise OutputError(
                f"forward returns {path} = {value!r}, a {type(value).__name__}, which a graph "
                "would freeze. Return tensors only; sizes are known from batch.spec outside"
            )


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
