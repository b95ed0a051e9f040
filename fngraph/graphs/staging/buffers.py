"""Static buffers: what graphs read in place of a batch's own leaves.

A buffer is as long as the ladder's top needs; a key's view of it is a leading slice, at the same
address for every key. `unpack` fills it, and pads the rows beyond the batch's own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from fngraph.core import BatchSpec, Buffer, BufferPlan, PlannedBuffer, Sizes
from fngraph.core.buffers import RAMPS, STRIDE
from fngraph.errors import TreeError


@dataclasses.dataclass(frozen=True, eq=False)
class StaticBuffers:
    """The static buffers of a buffer plan, in its order, on one device."""

    buffer_plan: BufferPlan
    tensors: tuple[torch.Tensor, ...]

    def views(self, sizes: Sizes) -> list[torch.Tensor]:
        """Leading slices for a key's sizes {"T": ..., "R": ..., ...}."""
        counts = [planned.buffer.rows(sizes) for planned in self.buffer_plan.buffers]
        return [x if n is None else x[:n] for x, n in zip(self.tensors, counts)]

    def __repr__(self) -> str:
        return repr(self.buffer_plan)


@torch.inference_mode(False)  # graphs write them, whatever mode the caller is in
def allocate(buffer_plan: BufferPlan, device: torch.device) -> StaticBuffers:
    """New buffers, of zeros."""
    made = (torch.zeros(b.shape, dtype=_dtype(b), device=device) for b in buffer_plan.buffers)
    return StaticBuffers(buffer_plan, tuple(made))


def padding_rows(
    buffer: Buffer, shape: Sequence[int], first: int, stride: int, device: torch.device | str
) -> torch.Tensor:
    """Rows of padding as their field declares it; of offsets, from `first` on."""
    dtype = getattr(torch, buffer.dtype)
    if buffer.pad in RAMPS:
        step = stride if buffer.pad == STRIDE else 0
        return (first + step * torch.arange(shape[0], device=device)).to(dtype)
    return torch.full(shape, buffer.pad, dtype=dtype, device=device)  # type: ignore[arg-type]


_AS_TENSOR = {"ndarray": "torch.from_numpy(x)"} | dict.fromkeys(
    ("int", "float", "bool", "list", "tuple"), "torch.tensor(x)"
)


def check_leaves(buffer_plan: BufferPlan, leaves: Sequence[object], true: Sizes) -> None:
    """Raise unless each leaf has the dtype, rank and length that its field and the spec say.

    Raises:
        TreeError: naming path, expected and got.
    """
    for error in leaf_errors(buffer_plan, leaves, true):
        raise error


def leaf_errors(
    buffer_plan: BufferPlan, leaves: Sequence[object], true: Sizes
) -> Iterator[TreeError]:
    """What is wrong with each leaf that is not what its field and the spec say."""
    for planned, leaf in zip(buffer_plan.buffers, leaves):
        wrong = _wrong_with(planned, leaf, true)
        if wrong is not None:
            yield TreeError(f"{planned.path}: {wrong}")


def _wrong_with(planned: PlannedBuffer, leaf: object, true: Sizes) -> str | None:
    """What was expected of a leaf, what it is, and the fix; None where that is the same."""
    if not isinstance(leaf, torch.Tensor):
        return (
            f"expected a tensor {planned.buffer}, got {type(leaf).__name__}. "
            f"Pass {_AS_TENSOR.get(type(leaf).__name__, 'one tensor')}"
        )
    if leaf.layout is not torch.strided or leaf.is_meta:
        where = "on the meta device" if leaf.is_meta else str(leaf.layout)
        return f"expected dense memory, got a tensor that is {where}"
    if leaf.dtype is not _dtype(planned):
        return (
            f"expected {planned.buffer}, got dtype {leaf.dtype}. "
            f"Convert it: x.to(torch.{planned.buffer.dtype})"
        )
    shape = planned.buffer.shape(true)
    if tuple(leaf.shape) == shape:
        return None
    letters = {letter for dim in planned.buffer.dims for letter in dim.letters}
    sizes = ", ".join(f"{k}={true[k]}" for k in sorted(letters))
    if not sizes:
        return (
            f"captured for exactly {planned.buffer}, got {list(leaf.shape)}. Call the graphified "
            "function itself, which keeps a key for each shape"
        )
    return (
        f"expected {planned.buffer} = {list(shape)} for {sizes}, got {list(leaf.shape)}. "
        f"{_how_to_fit(planned, tuple(leaf.shape), true)}"
    )


def _how_to_fit(planned: PlannedBuffer, got: tuple[int, ...], true: Sizes) -> str:
    """What to do with a leaf of another shape than its field says."""
    dims, want = planned.buffer.dims, planned.buffer.shape(true)
    other = [i for i, (a, b) in enumerate(zip(got, want)) if a != b]
    fixed = [i for i in other if not dims[i].moves and dims[i].letters]
    if len(got) != len(want) or not fixed:
        return "T and R come from the batch's spec, other letters from fg.Limits; make them agree"
    i = fixed[0]
    letter = min(dims[i].letters)
    said = f"limits=fg.Limits(..., {letter}={true[letter]})"
    exact = (
        f"{letter} is {true[letter]} in every batch, no bound: {said} says so, or the first batch"
    )
    if got[i] > want[i]:
        return (
            f"{exact}. Pass limits=fg.Limits(..., {letter}=...) of the widest, and pad the others"
        )
    pads = ", ".join(["0, 0"] * (len(got) - 1 - i) + [f"0, {want[i] - got[i]}"])
    return f"{exact}. Pad the leaf: torch.nn.functional.pad(x, ({pads}))"


def _dtype(planned: PlannedBuffer) -> torch.dtype:
    return getattr(torch, planned.buffer.dtype)


def true_sizes(spec: BatchSpec, dims: Sizes) -> dict[str, int]:
    """{"T": tokens, "R": requests} of a batch, and the limits' further letters."""
    return {**dims, "T": spec.num_tokens, "R": spec.num_reqs}
