"""One step of training as a pure function: train_step(params, opt, batch) -> params, opt, metrics.

train_step = make_train_step(loss, AdamW(), cosine(3e-3, steps=6000))
fast = fg.graphify(train_step, donate=("params", "opt"), stage="batch", modes="FULL")
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fngraph as fg
from fngraph.models.training.adamw import AdamW, Moments, Schedule, check, clipped, update

LossFn = Callable[..., Tensor]  # params, batch, frozen and what `draw` gave, if there are -> ()
TrainStep = Callable[..., tuple[Any, Moments, dict[str, Tensor]]]  # of params, opt, batch


def make_train_step(
    loss: LossFn, settings: AdamW, schedule: Schedule, *, frozen: bool = False, accumulate: int = 1,
    draw: Callable[[Any, Tensor], Any] | None = None,
) -> TrainStep:  # fmt: skip
    """What `fg.graphify` takes, with params and opt donated and the batch staged.

    Args:
        loss: the mean over a batch, (), float32.
        frozen: whether there are weights that stay as they are. They are an argument of their own,
            train_step(params, opt, batch, frozen) and loss(params, batch, frozen), of any dtype:
            without gradients and moments, and held, where `params` are donated.
        accumulate: batches whose gradients are averaged in one step. Above 1 each leaf of the batch
            has them along its first dim, (accumulate, ...), and memory is that of one of them.
        draw: what is random in a step, once for all of its batches: masks of dropout. It is made
            of the weights and the step's number, or drawn from a generator that
            `graphify(generators=)` is told of.

    Raises:
        ValueError: `accumulate`, or one of the settings, that is out of range.
        TypeError: what is no function, no `AdamW`, or no bool.
        TreeError: when it is called: weights that are no floats, or a batch whose leaves do not
            have `accumulate` batches, by path; a loss that is no number, or not of `params`.
    """
    expect = fg.core.text.expect
    expect(Callable, "a function of params and batch", TypeError, loss=loss)
    expect(Callable, "a function of the step, constant(3e-4)", TypeError, schedule=schedule)
    expect((Callable, type(None)), "a function of params and step", TypeError, draw=draw)
    expect(bool, "True or False; the weights are an argument of the step", TypeError, frozen=frozen)
    check(settings)
    if not isinstance(accumulate, int) or isinstance(accumulate, bool) or accumulate < 1:
        raise ValueError(f"accumulate={accumulate!r}: pass how many batches a step has, 1 or more")

    def step(params: Any, opt: Moments, batch: Any, *held: Any) -> Any:
        drawn = held if draw is None else (*held, draw(params, opt.step))
        leaves, treedef = fg.core.trees.flatten(params)
        _refuse("params", params, lambda w: w.dtype is torch.float32, (
            "and weights that are trained are float32: their steps are smaller than what bfloat16 "
            "tells apart. Layers may compute in bfloat16, make_loss(dtype=); what is no weight is "
            "part of the batch"
        ))  # fmt: skip

        def on(batch: Any) -> tuple[Any, Tensor]:
            given = fg.core.trees.flatten((leaves, batch, drawn))[0]
            grads, value = gradients(
                lambda w: loss(fg.core.trees.unflatten(treedef, w), batch, *drawn), leaves,
                again=torch.is_grad_enabled() and any(_is_recorded(x) for x in given),
            )  # fmt: skip
            return fg.core.trees.unflatten(treedef, grads), value

        lr = schedule(opt.step)
        if not isinstance(lr, Tensor) or lr.ndim:
            raise fg.errors.TreeError(
                f"the schedule gives {lr!r}, which is no tensor (): a number would be the same at "
                "each step of a graph. Compute it of the step, a tensor, as constant(3e-4) does"
            )
        grads, value = on(batch) if accumulate == 1 else mean_of(on, params, batch, accumulate)
        grads, norm = clipped(grads, settings.clip)
        params, opt = update(settings, params, grads, opt, lr)
        return params, opt, {"loss": value, "norm": norm, "lr": lr}

    def train_step(params: Any, opt: Moments, batch: Any) -> Any:
        return step(params, opt, batch)

    def train_some(params: Any, opt: Moments, batch: Any, frozen: Any) -> Any:
        return step(params, opt, batch, frozen)

    return train_some if frozen else train_step


def gradients(
    of: Callable[[list[Tensor]], Tensor], at: list[Tensor], *, again: bool = False
) -> tuple[list[Tensor], Tensor]:
    """Those of a loss, and its value: to the bit what `loss.backward()` leaves in leaves.

    `torch.func.grad` asks for what can be derived once more, and silu's gradient is then made of
    five ops; in bfloat16 each of them rounds, where its own kernel does once. So it is for where
    that is needed: inside of transforms, and where a caller derives what a step makes; and for
    inference mode, in which there are no leaves.

    Args:
        again: whether what comes out is derived once more.
    """
    leaves = None if again or torch.is_inference_mode_enabled() else _leaves(at)
    if leaves is None:
        grads, value = torch.func.grad_and_value(lambda w: checked_loss(of(w)))(at)
        return list(grads), value
    with torch.enable_grad():
        value = checked_loss(of(leaves))
        grads = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
    return list(grads), value.detach()


def _leaves(at: list[Tensor]) -> list[Tensor] | None:
    """New ones. None: inside of a transform, which nothing but this refusal of torch's tells."""
    try:
        return [w.detach().requires_grad_() for w in at]
    except RuntimeError:
        return None


def _is_recorded(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def checked_loss(value: Any) -> Tensor:
    """A loss that weights can be trained by.

    Raises:
        TreeError: no single number, or one that no weight has a part in.
    """
    if not isinstance(value, Tensor) or value.ndim or not value.is_floating_point():
        found = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise fg.errors.TreeError(f"loss gives {found}: one float (), the mean over the batch")
    if not value.requires_grad:
        raise fg.errors.TreeError(
            "loss gives a number that does not depend on params, so that nothing is trained. "
            "Compute it of them, without detach(); what is frozen is an argument of its own"
        )
    return value


def mean_of(
    on: Callable[[Any], tuple[Any, Tensor]], params: Any, batches: Any, count: int
) -> tuple[Any, Tensor]:
    """Gradients and loss averaged over so many batches, one after the other.

    Raises:
        TreeError: a leaf of `batches` whose first dim is not `count`, by path.
    """
    _refuse("batch", batches, lambda x: x.ndim > 0 and x.shape[0] == count, (
        f"and accumulate={count}: each leaf has as many batches along its first dim, ({count}, ...)"
    ))  # fmt: skip
    zeros = fg.core.trees.map_leaves(torch.zeros_like, params)

    def body(carry: Any, batch: Any) -> tuple[Any, Tensor]:
        grads, value = on(batch)
        return added(carry, grads), value

    total, values = fg.scan(body, zeros, batches)
    return fg.core.trees.map_leaves(lambda g: g / count, total), values.mean()


def _refuse(name: str, tree: Any, right: Callable[[Tensor], bool], why: str) -> None:
    """Raise a TreeError for the first leaf that is not right."""
    leaves, treedef = fg.core.trees.flatten(tree)
    for path, x in zip(fg.core.trees.paths(treedef, name), leaves):
        if not right(x):
            raise fg.errors.TreeError(f"{path} is {x.dtype} {tuple(x.shape)}, {why}")


def added(a: Any, b: Any) -> Any:
    """Two trees, leaf by leaf."""
    leaves, treedef = fg.core.trees.flatten(a)
    others = fg.core.trees.flatten(b)[0]
    return fg.core.trees.unflatten(treedef, [x + y for x, y in zip(leaves, others)])
