"""What a graph calls: ops with their overloads, `torch.ops.aten.mul.Tensor`; arithmetic of sizes.

Anything else, `torch.ops.aten.mul`, `torch.mul`, a function of one's own, is a `PassError` that
says what to write in its place.
"""

from __future__ import annotations

import math
import operator
import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fngraph.core.text import count, did_you_mean
from fngraph.errors import PassError
from fngraph.fx.nodes import flat, is_loop, is_op, is_tensor
from fngraph.torch_facts.names import OpOverload, OpOverloadPacket

_TRACED = {  # of ops that have several overloads, the one that traces have
    "add": "Tensor", "sub": "Tensor", "mul": "Tensor", "div": "Tensor", "pow": "Tensor_Scalar",
    "mean": "dim", "slice": "Tensor", "transpose": "int", "split": "Tensor", "select": "int",
    "mm": "default", "bmm": "default", "addmm": "default", "view": "default", "index": "Tensor",
    "where": "self",
}  # fmt: skip
_TENSORS = ("Tensor", "Optional[Tensor]", "List[Tensor]", "List[Optional[Tensor]]")
OF_ONE_S_OWN = "an op of your own, torch.library.custom_op with register_fake"


def overload_of(op: Any) -> OpOverload:
    """An op with its overload. One that is named without has its only one, or the one that traces
    have of it.

    Raises:
        PassError: it has several; or it is no op.
    """
    if isinstance(op, OpOverload):
        return op
    if isinstance(op, OpOverloadPacket):
        name = op.__name__.rpartition(".")[2]
        names = [_TRACED[name]] if name in _TRACED else _overloads(op)
        if len(names) == 1:
            return getattr(op, names[0])  # type: ignore[no-any-return]
    raise PassError(f"{named(op)} is no op with its overload. Write {meant(op)}")


def check_arguments(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise `PassError` for arguments of a pattern that no call of the op has."""
    takes = op._schema.arguments
    if len(args) > len(takes):
        raise PassError(
            f"{named(op)} takes {count(len(takes), 'argument')}, and the pattern has {len(args)}"
        )
    unknown = [name for name in kwargs if name not in {x.name for x in takes}]
    if unknown:
        known = [x.name for x in takes]
        raise PassError(
            f"{named(op)} has no argument {unknown[0]!r}; it has {', '.join(known)}."
            f"{did_you_mean(unknown[0], known)}"
        )
    for x, given in zip(takes, args):
        if str(x.type) in _TENSORS and not isinstance(given, _PATTERNS):
            fix = f"name({given!r})" if isinstance(given, str) else "name('x')"
            fix = f"call({named(given)}, ...)" if hasattr(given, "overloads") else fix
            raise PassError(
                f"{named(op)} takes a tensor as {x.name}, and the pattern has {named(given)}, "
                f"which no graph has there. Write {fix}"
            )


_PATTERNS = (tuple, list, int, float, complex, types.NoneType)  # names and calls are tuples


def meant(op: Any) -> str:
    """What to write in place of what is no op with its overload."""
    if isinstance(op, OpOverloadPacket):
        return " or ".join(f"torch.ops.{op}.{name}" for name in _overloads(op)) or OF_ONE_S_OWN
    if hasattr(op, "_opoverload"):
        return f"torch.ops.{op._opoverload}"
    name = op if isinstance(op, str) else getattr(op, "__name__", "")
    packet = getattr(torch.ops.aten, name, None) if name is op or _is_torchs(op) else None
    return OF_ONE_S_OWN if packet is None else meant(packet)


def named(op: Any) -> str:
    """An op, a function or what else was called, as people write it."""
    if isinstance(op, OpOverload | OpOverloadPacket):
        return f"torch.ops.{op}"
    name = getattr(op, "__name__", "")
    if name and getattr(torch, name, None) is op:
        return f"torch.{name}"
    return getattr(op, "__qualname__", None) or repr(op)


def check_call(node: fx.Node) -> str:
    """What is wrong with what a node calls; "": nothing."""
    own = [x for x in flat([list(node.args), dict(node.kwargs)]) if isinstance(x, torch.Tensor)]
    if own:
        return (
            f"gives {named(node.target)} a tensor that is none of the graph's. Insert a "
            'get_attr, with the tensor as meta["value"] and a fake of it as meta["val"]; or give '
            "it a number"
        )
    if node.op in ("call_method", "call_module"):
        fix = meant(getattr(torch, str(node.target), None)) if node.op == "call_method" else ""
        return f"has put a {node.op} of {str(node.target)!r} there. Call an op, {fix or _EXAMPLE}"
    if node.op != "call_function" or is_op(node) or is_loop(node) or _is_arithmetic(node):
        return ""
    return f"has put {named(node.target)} there, which is no op with its overload. Write " + meant(
        node.target
    )


_EXAMPLE = "torch.ops.aten.tanh.default"


def _overloads(packet: Any) -> list[str]:
    """Those that take tensors and write into none that is given as `out`."""
    found = []
    for name in packet.overloads():
        schema = getattr(packet, name)._schema
        if any(x.is_out or _is_named_dim(x) for x in schema.arguments):
            continue
        if name.endswith("hacked_twin"):  # TorchScript's
            continue
        if any(str(x.type) in _TENSORS for x in schema.arguments):
            found.append(name)
    return found


def _is_named_dim(argument: Any) -> bool:
    """Whether it is a `Dimname`, as ops on named tensors take; a schema says "str" of it."""
    return "str" in str(argument.type) and ("dim" in argument.name or argument.name == "names")


def _is_torchs(op: Any) -> bool:
    module = getattr(op, "__module__", None) or ""
    return callable(op) and module.partition(".")[0] in ("torch", "_operator", "math")


def _is_arithmetic(node: fx.Node) -> bool:
    """Whether it takes results apart, or computes with sizes."""
    of_tensors = any(_gives_tensor(x) for x in node.all_input_nodes)
    if node.target is operator.getitem:
        return not of_tensors
    target: Any = node.target
    name = getattr(target, "__name__", "")
    known = any(getattr(module, name, None) is target for module in (operator, math))
    return not of_tensors and (known or (name.startswith("sym_") and _is_torchs(target)))


def _gives_tensor(x: fx.Node) -> bool:
    returns: Any = x.target._schema.returns if is_op(x) else ()  # type: ignore[union-attr]
    return is_tensor(x) or (len(returns) == 1 and str(returns[0].type) == "Tensor")
