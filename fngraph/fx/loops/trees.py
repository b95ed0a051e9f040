"""What goes into a loop and comes out: trees of tensors, of which each turn keeps shape and dtype.

A carry keeps its structure too, as in JAX; what differs is named by its path, with what was
expected and what came.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from fngraph.core import trees
from fngraph.core.where import user_line
from fngraph.errors import TransformError, TreeError
from fngraph.torch_facts.names import is_batched


def flatten(tree: Any, fn: str, root: str) -> tuple[list[torch.Tensor], Any]:
    """The tensors of a tree, and its structure.

    Args:
        fn: whose argument or result it is, "fg.scan", for errors.
        root: what it is called there, "carry".

    Raises:
        TreeError: a leaf that is no tensor.
    """
    trees.register_dataclasses(tree)
    leaves, treedef = trees.flatten(tree)
    for path, leaf in zip(trees.paths(treedef, root), leaves):
        if not isinstance(leaf, torch.Tensor):
            raise TreeError(
                f"{user_line()}: {path} of {fn} is {leaf!r} ({type(leaf).__name__}), and a loop "
                "holds tensors alone. Make it one: torch.tensor(x); or close over it, where it "
                "stays as it is"
            )
    return leaves, treedef


def check_one_device(fn: str, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Refuse what a graph would take for a number of the host: as it was at capture, forever.

    Args:
        named: what each turn gets or gives, and the predicate; paths and tensors.

    Raises:
        TreeError: two of them are on two devices.
    """
    first: tuple[str, torch.Tensor] | None = None
    for path, x in named:
        first = first or (path, x)
        if x.device != first[1].device:
            there, here = (first, (path, x)) if x.device.type == "cpu" else ((path, x), first)
            raise TreeError(
                f"{user_line()}: {fn}: {here[0]} is {brief(here[1])}, and {there[0]} "
                f"{brief(there[1])}. A loop and its predicate stay on one device: make "
                f'{here[0]} there, device="{there[1].device}"'
            )


def check_alike(
    fn: str, what: str, expected: tuple[Sequence[torch.Tensor], Any], got: Any, root: str
) -> list[torch.Tensor]:
    """The tensors of `got`, which must be as `expected` are.

    Args:
        what: of which function `got` came, and what it should be like: "body gives".

    Raises:
        TreeError: with path, got and expected.
    """
    leaves, treedef = flatten(got, fn, root)
    wanted, tree = expected
    if treedef != tree:
        lines = "\n".join(trees.differences(tree, treedef, root))
        raise TreeError(f"{user_line()}: {fn}: {what} another structure:\n{lines}\n{_fix(fn)}")
    paths = trees.paths(tree, root)
    lines = "\n".join(
        f"  {path}: got {brief(new)}, expected {brief(old)}"
        for path, old, new in zip(paths, wanted, leaves)
        if brief(old) != brief(new)
    )
    if lines:
        raise TreeError(f"{user_line()}: {fn}: {what} other tensors:\n{lines}\n{_fix(fn)}")
    return leaves


def _fix(fn: str) -> str:
    same = (
        "of both functions are the same" if fn == "fg.cond" else "stay the same from turn to turn"
    )
    return f"Shapes, dtypes and structure {same}: x.to(dtype), torch.where"


def brief(x: torch.Tensor) -> str:
    """`float32 (3, 4) on cpu`: what stays the same of a tensor. Sizes as text: to compare T with a
    number is to ask for it."""
    sizes = ", ".join(map(str, x.shape))
    shape = f"({sizes},)" if x.dim() == 1 else f"({sizes})"
    return f"{str(x.dtype).removeprefix('torch.')} {shape} on {x.device}"


def check_functions(call: str, takes: str, **given: Any) -> None:
    """Raise TreeError for what is no function, or one of other arguments.

    Args:
        call: how it is called, `fg.scan(body, carry, xs)`.
        takes: the functions' arguments, "carry, x".
    """
    for name, function in given.items():
        if not callable(function):
            shown = brief(function) if isinstance(function, torch.Tensor) else repr(function)
            raise TreeError(f"{user_line()}: {name}={shown}, expected a function: {call}")
        try:
            own = inspect.signature(function)
            own.bind(*(takes.split(", ") if takes else ()))
        except ValueError:  # of C, which does not say
            continue
        except TypeError:
            advice = "Both functions are given what comes behind them"
            if not call.startswith("fg.cond"):
                advice = "A carry of several tensors is one tree: a, b = carry, in it"
            raise TreeError(
                f"{user_line()}: {call}: {name} takes {own}, and is called as {name}({takes}). "
                f"{advice}"
            ) from None


def check_pred(fn: str, what: str, pred: Any) -> torch.Tensor:
    """A predicate that is one bool.

    Raises:
        TreeError: it is something else. TransformError: `torch.vmap` maps over it.
    """
    if isinstance(pred, torch.Tensor) and is_batched(pred):
        raise TransformError(
            f"{user_line()}: {fn}: {what} one that torch.vmap maps over: each row has its own. "
            "Choose row by row: torch.where(pred, a, b); take as many turns as the longest does"
        )
    if isinstance(pred, torch.Tensor) and pred.dtype is torch.bool and pred.dim() == 0:
        return pred
    given = brief(pred) if isinstance(pred, torch.Tensor) else f"{pred!r}"
    raise TreeError(
        f"{user_line()}: {fn}: {what} {given}, expected bool () on the device: one tensor that "
        "says yes or no, (x > 0).any(); where each row has its own, torch.where(mask, a, b)"
    )


def leading(xs: Sequence[torch.Tensor], treedef: Any, length: int | None) -> int:
    """How many turns a scan over `xs` takes.

    Raises:
        TreeError: tensors without a first dim, or of several lengths, or none at all.
    """
    if length is not None and (not isinstance(length, int) or isinstance(length, bool)):
        raise TreeError(f"{user_line()}: fg.scan: length={length!r}, expected an int")
    found: dict[int, str] = {} if length is None else {length: "length"}
    for path, x in zip(trees.paths(treedef, "xs"), xs):
        if x.dim() == 0:
            raise TreeError(
                f"{user_line()}: fg.scan: {path} is {brief(x)}, which has no first dim to go "
                "along. Close over what all turns share"
            )
        found.setdefault(x.shape[0], path)
    if len(found) != 1:
        told = ", ".join(f"{path}: {n}" for n, path in found.items()) or "neither xs nor length"
        raise TreeError(f"{user_line()}: fg.scan: how many turns? {told}. Give all one first dim")
    (turns,) = found
    if turns < 0:
        raise TreeError(f"{user_line()}: fg.scan: length={turns}, expected 0 or more")
    return turns


def moving_first(xs: Sequence[torch.Tensor], treedef: Any) -> Iterator[tuple[str, Any]]:
    """Path and first size of each tensor whose first dim is made of T or R."""
    for path, x in zip(trees.paths(treedef, "xs"), xs):
        if x.dim() and isinstance(x.shape[0], torch.SymInt):
            yield path, x.shape[0]
