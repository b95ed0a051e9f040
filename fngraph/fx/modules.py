"""`from_module`: an `nn.Module` as a pure function of its parameters and buffers."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import typing
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fngraph.core.text import expect
from fngraph.errors import TreeError
from fngraph.fx.tracing.purity import tracing_mode

Tensors = dict[str, Tensor]
Contents = dict[str, tuple[Any, Any]]  # an attribute's value, and a copy of a container
_OWN = ("params", "buffers")


def from_module(module: nn.Module) -> tuple[Callable[..., Any], Tensors, Tensors]:
    """A module as `forward(params, buffers, ...)`, with its parameters and buffers taken out.

        forward, params, buffers = fg.from_module(net.eval())
        fast = fg.graphify(forward, stage="x")
        y = fast(params, buffers, x)

    The tensors are the module's own memory, without `requires_grad`: an optimiser's step or
    `load_state_dict` shows in both. What is tied is listed once, under its first name, and is tied
    in `forward` too. What gives the module other memory (`net.double()`, `net.to(...)`) does not
    show: take them out again then. Whether it trains or evaluates is what the module says when
    `forward` runs.

    A module that writes its buffers (a BatchNorm that trains) writes them in `buffers`, in place;
    one that gives a buffer another tensor (`self.mean = ...`) puts that into `buffers`. Graphified,
    they are to be donated, so return them:

        def step(params, buffers, x):
            return forward(params, buffers, x), buffers

        fast = fg.graphify(step, donate="buffers", stage="x")

    Args:
        module: any; of one under `torch.compile`, the module inside.

    Returns:
        `forward`, whose further parameters are those of the module's own forward; names to
        parameters; names to buffers, the non-persistent ones too.

    Raises:
        TreeError: a lazy module that has not run yet, or whose forward has a parameter called
            `params` or `buffers`. By `forward`: one of two tied tensors is given another one.
    """
    expect(nn.Module, "a module", TreeError, module=module)
    module = getattr(module, "_orig_mod", module)
    own = list(inspect.signature(module.forward).parameters.values())
    taken = [p.name for p in own if p.name in _OWN]
    if taken:
        raise TreeError(
            f"{type(module).__name__}.forward has a parameter {taken[0]!r} of its own, which is "
            "what from_module calls the module's tensors. Rename it"
        )
    parameters: Tensors = dict(module.named_parameters())
    buffers = dict(module.named_buffers())
    for name, tensor in (parameters | buffers).items():
        if nn.parameter.is_lazy(tensor):
            raise TreeError(
                f"{type(module).__name__}.{name} has no shape yet. Run the module once on an "
                "example: module(x)"
            )

    attributes = _attributes(module, parameters | buffers)
    known = {name for _, name in attributes}

    def forward(params: Tensors, buffers: Tensors, *args: Any, **kwargs: Any) -> Any:
        given = {**params, **buffers}
        tensors = {attribute: given[name] for attribute, name in attributes if name in given}
        tensors |= {name: x for name, x in given.items() if name not in known}
        before = dict(tensors)
        with _as_it_was(module):
            result = torch.func.functional_call(module, tensors, args, kwargs, tie_weights=False)
        for attribute, name in attributes:
            if attribute not in before or (new := tensors[attribute]) is before[attribute]:
                continue
            if (other := untied(attribute, name, tensors)) is not None:
                raise TreeError(
                    f"{type(module).__name__}.{attribute} is given another tensor, and was tied "
                    f"to {other}, which keeps its own. Give it to both, or write it in place: "
                    f"self.{attribute}.copy_(new)"
                )
            (params if name in params else buffers)[name] = new
        return result

    def untied(attribute: str, name: str, tensors: Tensors) -> str | None:
        """Another attribute of that name, which has another tensor by now."""
        new = tensors.get(attribute)
        return next((a for a, n in attributes if n == name and tensors.get(a) is not new), None)

    first = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in _OWN]
    if own and own[0].kind is inspect.Parameter.POSITIONAL_ONLY:
        first = [p.replace(kind=inspect.Parameter.POSITIONAL_ONLY) for p in first]
    forward.__signature__ = inspect.Signature([*first, *own])  # type: ignore[attr-defined]
    forward.__annotations__ = _hints(module, [p.name for p in own])
    forward.__name__ = type(module).__name__
    return forward, _detached(parameters), _detached(buffers)


def _hints(module: nn.Module, names: Sequence[str]) -> dict[str, Any]:
    """Annotations of a module's own forward, looked up where it was written if they can be."""
    fn = inspect.unwrap(type(module).forward)
    try:
        hints = typing.get_type_hints(fn)
    except Exception:  # names that are there for type checkers alone, or local
        hints = getattr(fn, "__annotations__", {})
    return {name: hints[name] for name in names if name in hints}


@contextlib.contextmanager
def _as_it_was(module: nn.Module) -> Iterator[None]:
    """Put back what a call leaves in a module beside its parameters and buffers.

    What torch's own code keeps there is made anew by each call: the list of weights of an RNN,
    `weight` of weight_norm, spectral_norm and pruning. What the module's own forward keeps is the
    caller's; of a trace it is put back at its end, which refuses it.
    """
    before = [(part, _contents(vars(part))) for part in module.modules()]
    own = [{n: x for n, x in found.items() if _is_torchs(part, n)} for part, found in before]
    tracing = tracing_mode()
    if tracing is not None:
        tracing.made.at_end(functools.partial(_put_all_back, before))
    try:
        yield
    finally:
        for (part, _), found in zip(before, own):
            _put_back(part, found)


def _contents(namespace: dict[str, Any]) -> Contents:
    """Each attribute, and a copy where it is a container that may be changed where it is."""
    return {
        name: (value, copy.copy(value) if type(value) in (list, dict, set) else None)
        for name, value in namespace.items()
        if name not in ("_parameters", "_buffers", "_modules")
    }


def _is_torchs(part: nn.Module, name: str) -> bool:
    """Whether torch's own code sets an attribute at each call."""
    if isinstance(part, nn.RNNBase) and name in ("_flat_weights", "_flat_weight_refs"):
        return True
    hooks = part._forward_pre_hooks.values()
    named = [getattr(hook, "name", getattr(hook, "_tensor_name", None)) for hook in hooks
             if type(hook).__module__.startswith("torch.nn.utils.")]  # fmt: skip
    return name in named


def _put_all_back(before: Sequence[tuple[nn.Module, Contents]]) -> None:
    for part, found in before:
        for name in set(_contents(vars(part))) - set(found):
            del vars(part)[name]
        _put_back(part, found)


def _put_back(part: nn.Module, found: Contents) -> None:
    for name, (value, copied) in found.items():
        if isinstance(value, list):
            value[:] = value if copied is None else copied
        elif copied is not None:
            value.clear()
            value.update(copied)
        vars(part)[name] = value


def _attributes(module: nn.Module, named: Tensors) -> list[tuple[str, str]]:
    """Each attribute that holds a tensor, once, and the name that the tensor is listed under.

    With tied names, `functional_call` fills an attribute of a module that has two names twice, and
    puts the tensor of the call back in place of the module's own.
    """
    names = {id(tensor): name for name, tensor in named.items()}
    return [
        (f"{path}.{attribute}".lstrip("."), names[id(tensor)])
        for path, part in module.named_modules()
        for attribute, tensor in (*part._parameters.items(), *part._buffers.items())
        if tensor is not None
    ]


def _detached(tensors: Tensors) -> Tensors:
    return {name: tensor.detach() for name, tensor in tensors.items()}
