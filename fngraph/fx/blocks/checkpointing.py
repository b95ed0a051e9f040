"""`checkpoint`: a body whose activations are not kept for the backward, which makes them again.

Of a body that is marked, a gradient keeps the arguments alone. Its backward runs the body once more
and takes the gradient of that, so that a traced step has the body's ops twice, and the activations
of one body at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint as made_again

from fngraph.core import trees
from fngraph.core.text import expect
from fngraph.core.where import defined_at, user_line
from fngraph.errors import ClosureError, MutationError, RandomError, TreeError
from fngraph.fx.generators import drawn
from fngraph.fx.schemas import draws
from fngraph.torch_facts.names import (
    DisableTorchFunction,
    TorchDispatchMode,
    alive,
    are_transforms_active,
    current_level,
    dispatch_mode,
    level_of,
    tree_leaves,
)
from fngraph.torch_facts.tracing import get_proxy_mode, in_forward_mode

Body = TypeVar("Body", bound=Callable[..., Any])


def checkpoint(fn: Body) -> Body:
    """Mark a body, so that its backward makes its activations again in place of keeping them.

    Values and gradients are those of `fn`, bit for bit where its ops give the same twice. What is
    kept for the backward is the body's arguments; its own memory is that of one body at a time. It
    takes the time of one more forward of the body. Without a gradient it is `fn` itself.

    Args:
        fn: any pure function of trees of tensors and other values, to trees of tensors and values.
            What gradients go through must be an argument of it: a closed-over weight is an error.

    Raises:
        ClosureError: when it is called: gradients go to a tensor that is no argument of it.
        MutationError: it writes into an argument, which the second run would read.
        RandomError: it draws random numbers, of which the second run would draw others.
    """
    expect(Callable, "a function", TreeError, body=fn)

    @functools.wraps(fn)
    def body(*args: Any, **kwargs: Any) -> Any:
        if in_forward_mode():  # tangents keep nothing
            return fn(*args, **kwargs)
        if are_transforms_active():
            return _through_transforms(fn, args, kwargs)
        leaves = trees.flatten((args, kwargs))[0]
        asked = any(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves)
        if not (asked and torch.is_grad_enabled()):
            return fn(*args, **kwargs)
        run = functools.partial(_watched, fn)
        return made_again(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return body  # type: ignore[return-value]


def _through_transforms(fn: Any, args: Any, kwargs: Any) -> Any:
    leaves, treedef = trees.flatten((args, kwargs))
    at = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
    found: list[Any] = []  # the output's structure, and what in it is no tensor

    def flat_fn(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = list(leaves)
        for i, x in zip(at, tensors):
            given[i] = x
        own_args, own_kwargs = trees.unflatten(treedef, given)
        out, out_treedef = trees.flatten(fn(*own_args, **own_kwargs))
        are = [isinstance(x, torch.Tensor) for x in out]
        found[:] = [out_treedef, [None if is_one else x for x, is_one in zip(out, are)], are]
        mine = {id(x) for x in tensors}  # an argument that comes back would be its own gradient
        return tuple(x.view_as(x) if id(x) in mine else x for x, y in zip(out, are) if y)

    results = iter(_Again.apply(fn, flat_fn, *(leaves[i] for i in at)))
    out_treedef, values, are = found
    return trees.unflatten(out_treedef, [next(results) if y else x for x, y in zip(values, are)])


class _Again(torch.autograd.Function):
    """Keeps its arguments; its backward is that of the function, run on them once more."""

    generate_vmap_rule = True

    @staticmethod
    def forward(fn: Any, flat_fn: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with _Arguments(fn):
            return _watched(flat_fn, *tensors, about=fn)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.flat_fn, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*(x for x in output if not _has_gradient(x)))
        ctx.smooth = [_has_gradient(x) for x in output]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # a pullback may be called when its transform is over, which has wrapped them
        tensors: Sequence[torch.Tensor] = list(map(alive, ctx.saved_tensors))
        grads = tuple(map(alive, grads))
        asked = ctx.needs_input_grad[2:]
        at = [i for i, x in enumerate(tensors) if asked[i] and _has_gradient(x)]

        def smooth(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
            all_given = list(tensors)
            for i, x in zip(at, given):
                all_given[i] = x
            return tuple(x for x, y in zip(ctx.flat_fn(*all_given), ctx.smooth) if y)

        pull: Any = torch.func.vjp(smooth, *(tensors[i] for i in at))[1]
        found = dict(zip(at, pull(tuple(g for g, y in zip(grads, ctx.smooth) if y))))
        return None, None, *(found.get(i) for i in range(len(tensors)))


def _has_gradient(x: torch.Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _watched(run: Any, *args: Any, about: Any = None, **kwargs: Any) -> Any:
    """`run`, unless it draws or writes what a second run would see.

    In a trace its ops are read off the graph; else a mode sees them.
    """
    name = about or run
    proxies: Any = get_proxy_mode() if dispatch_mode() is not None else None
    given = [x for x in trees.flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
    with DisableTorchFunction():
        before = [None if x.is_inference() else x._version for x in given]
    if proxies is None:
        with _NoDraws(name):
            out = run(*args, **kwargs)
    else:
        known = len(proxies.tracer.graph.nodes)
        out = run(*args, **kwargs)
        if any(drawn(node) is not None for node in list(proxies.tracer.graph.nodes)[known:]):
            raise _random(name)
    with DisableTorchFunction():
        if before != [None if x.is_inference() else x._version for x in given]:
            raise MutationError(
                f"{user_line()}: a body under fg.checkpoint ({defined_at(name)}) writes into an "
                "argument, which its second run, in the backward, would read. Return a new value"
            )
    return out


def _random(fn: Any) -> RandomError:
    return RandomError(
        f"{user_line()}: a body under fg.checkpoint ({defined_at(fn)}) draws random numbers, and "
        "its second run, in the backward, would draw others. Draw them before the body, and pass "
        "them to it"
    )


class _NoDraws(TorchDispatchMode):
    """Refuses ops that draw."""

    def __init__(self, fn: Any) -> None:
        super().__init__()
        self.fn = fn

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if draws(func, args, kwargs or {}):
            raise _random(self.fn)
        return func(*args, **kwargs or {})


class _Arguments(TorchFunctionMode):
    """Refuses a tensor of the transform that goes through the body and that it was not given: its
    gradient would be lost."""

    def __init__(self, fn: Any) -> None:
        super().__init__()
        self.fn, self.level = fn, current_level() or 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, torch.Tensor) and level_of(x) > self.level and _has_gradient(x):
                raise ClosureError(
                    f"{user_line()}: a body under fg.checkpoint ({defined_at(self.fn)}) reads a "
                    f"tensor {list(x.shape)} that is no argument of it, so its gradient would be "
                    "lost. Pass it as one"
                )
        return func(*args, **kwargs or {})
