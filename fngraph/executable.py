"""`Executable`: a function made ready to run, for leaves of one kind and under one ambient state.

It is what the stages hand down: flat, with no stage in it, and all that a step needs. The two
things that only a stage could do, making it again for other leaves or under another state, it asks
of its `Maker`.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from fngraph.compile.piece import CompiledPiece
from fngraph.core import BatchDescriptor, BufferPlan, Dim, DispatchTable, Limits, Mode, key_sizes
from fngraph.core.costs.launch import Count, LaunchModel
from fngraph.core.costs.roofline import Constants
from fngraph.core.memory import Bytes
from fngraph.core.program import Program
from fngraph.core.spec import Key
from fngraph.core.text import count as counted, expect
from fngraph.errors import CaptureError, PackageError
from fngraph.fx.arguments import Arguments
from fngraph.fx.donation.table import DonationTable
from fngraph.fx.leaves import Leaf
from fngraph.fx.rows.boxes import Boxes
from fngraph.fx.tracing.ambient import Ambient
from fngraph.graphs.replay import InstructionFn
from fngraph.one_launch import Layers, OneLaunch
from fngraph.ops.backend import Planner
from fngraph.ranks.agreement import Peers

LOG = logging.getLogger("fngraph")


class Maker(Protocol):
    """How an executable was made, and can be made again."""

    def for_leaves(self, old: Executable, leaves: Sequence[Leaf]) -> Executable:
        """The function for other leaves; with the callables of `old` if it computes as before.

        Raises:
            FnGraphError: `forward` refuses them.
        """
        ...

    def under(self, ambient: Ambient) -> Executable | None:
        """The function under the ambient state of now, which is `ambient`; None: it is the same.

        Raises:
            AmbientError: it is another, and `on_ambient="error"` was asked for.
        """
        ...

    def keeps_order(self, position: int, treedef: Any) -> bool:
        """Whether the function computes the same for an argument of that structure, which has the
        traced one's keys in another order; it does unless it goes by the order."""
        ...

    def rehearse(
        self, true: Sequence[torch.Tensor], padded: Sequence[torch.Tensor]
    ) -> tuple[str, str, str] | None:
        """Run the function as it was traced on a batch, and on it in a key: the first op, the
        user's line and what is said there of padding that is not so; None: all of it is.

        Args:
            true: all leaves at the batch's sizes. They are written where it writes them.
            padded: the same at a key's.
        """
        ...

    def accepts(self, leaves: Sequence[Leaf]) -> bool:
        """Whether the function keeps padding out of true rows with these leaves' pads."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Executable:
    """All that later steps need.

    Attributes:
        args: the abstract arguments.
        out_tree: structure of what `forward` returns.
        returns: index of a donated leaf to the index of the output leaf that is its new value.
        program: instructions over numbered values: leaves, constants, then what is computed.
        fns: one an instruction, `fn(sizes, host, *tensors) -> tensors`; equal pieces share theirs.
        row_dims: for each instruction, the varying first dims of its arguments; none for a piece.
        planners: what backends plan on the host before each step.
        output_dims: for each output that is not donated, its dims in T and R.
        output_aliased: whether it is memory of an input or of another output.
        constants: tensors made from literals inside `forward`.
        backends: what runs each call of a primitive, by its name in the program.
        donation: how each donated leaf gets its new value.
        notes: why anything is not as it was asked for.
        generators: those that `forward` draws from.
        table: which keys there are.
        limits: bounds of every step.
        query_lens: tokens a request of the uniform batches that will come.
        plan: the static buffers.
        estimate: bytes that a key will take, of its mode and descriptor.
        count: what its instructions do, for a launch model.
        level: of compilation.
        compiled: pieces that were compiled, each once.
        matches: how often each pass has matched, by its name.
        modules: for each instruction its traced ops, `gm(T, R, *tensors)`; None for a primitive.
        asked: which of "grad" and "inference" mode `forward` has asked for.
        dirty: index of an output to its elements that are not bare `forward`'s, kept for padding.
        peers: the processes that its collectives meet; None: it has none.
        divided: index of a leaf that tells a primitive where sequences begin, to the rows that they
            are of.
        one_launch: what FULL keys of a few requests, a token each, run in the place of `program`;
            None: they run that.
    """

    args: Arguments
    out_tree: Any
    returns: Mapping[int, int]
    program: Program
    fns: tuple[InstructionFn, ...]
    row_dims: tuple[tuple[Dim | None, ...], ...]
    planners: tuple[Planner, ...]
    output_dims: tuple[tuple[Dim, ...], ...]
    output_dtypes: tuple[torch.dtype, ...]
    output_aliased: tuple[bool, ...]
    constants: tuple[torch.Tensor, ...]
    backends: Mapping[str, str]
    donation: DonationTable
    notes: tuple[str, ...]
    generators: tuple[torch.Generator, ...]
    table: DispatchTable
    limits: Limits
    query_lens: tuple[int, ...]
    plan: BufferPlan
    estimate: Callable[[Mode, BatchDescriptor], Bytes]
    count: Count
    level: str
    compiled: tuple[CompiledPiece, ...]
    matches: Mapping[str, int]
    maker: Maker
    modules: tuple[fx.GraphModule | None, ...] = ()
    asked: frozenset[str] = frozenset()
    dirty: Mapping[int, Boxes] = dataclasses.field(default_factory=dict)
    peers: Peers | None = None
    divided: Mapping[int, Dim] = dataclasses.field(default_factory=dict)
    one_launch: OneLaunch | None = None

    def sizes(self, descriptor: BatchDescriptor) -> dict[str, int]:
        """{"T": padded tokens, "R": padded requests, ...} of a key."""
        return sizes_of(descriptor, self.limits)

    def program_of(
        self, key: Key, inputs: Sequence[torch.Tensor]
    ) -> tuple[Program, tuple[InstructionFn, ...]]:
        """What a key runs, over these inputs, with its callables."""
        mode, descriptor = key
        if (one := self.one_launch_of(key)) is not None:
            try:
                return one.program, one.over(inputs, descriptor.num_tokens)
            except (CaptureError, PackageError) as error:
                _warn(
                    f"{mode} {descriptor}: layers run kernel by kernel, and not as one launch: "
                    f"{error}"
                )
        return self.program, self.fns

    def one_launch_of(self, key: Key) -> OneLaunch | None:
        """What a key is to run in the place of `program`; `program_of` where it cannot be made."""
        (mode, descriptor), one = key, self.one_launch
        serves = one is not None and mode is Mode.FULL and one.layers.serves(descriptor)
        return one if serves else None

    def compiled_of(self, key: Key) -> tuple[CompiledPiece, ...]:
        """The compiled pieces of a key."""
        one = self.one_launch_of(key)
        return self.compiled if one is None else one.compiled

    @property
    def reads(self) -> set[int]:
        """Indices of the leaves that some instruction reads, or that are returned."""
        read = {i for one in self.program.instructions for i in one.reads}
        return read | set(self.program.outputs)


@functools.cache
def _warn(text: str) -> None:
    """Once a process: a key is run before it is recorded."""
    LOG.warning("%s. graphify(..., megakernel=False) goes without", text)


def sizes_of(descriptor: BatchDescriptor, limits: Limits) -> dict[str, int]:
    """{"T": padded tokens, "R": padded requests, ...} of a key.

    Raises:
        SpecError: no key.
    """
    expect(BatchDescriptor, "a key of the table, table.keys(mode)[0]", descriptor=descriptor)
    return key_sizes(descriptor.num_tokens, descriptor.num_reqs, limits.max_reqs, limits.dims)


COMPILED = (
    "pieces are compiled, and counted op by op: fewer kernels will run, which move fewer bytes"
)


def launch_model_of(
    count: Count, table: DispatchTable, level: str, layers: Layers | None, constants: Constants,
    context: int | None,
) -> LaunchModel:  # fmt: skip
    """See `Lowered.launch_model`.

    Args:
        layers: those of a decoder that keys of few requests run as one launch.
    """
    notes = [] if level == "none" else [COMPILED]
    if layers is not None:
        notes.append(
            f"FULL keys of up to {counted(layers.most, 'request')}, a token each, run a decoder's "
            "layers as one launch, and are counted kernel by kernel: they take less"
        )
    return LaunchModel(count, table, constants, tuple(notes), context)
