"""`Captured`: bound leaves, static buffers and one replay a key; calling it is one step.

    batch.spec -> dispatch -> stage -> replay -> own

The one stage with state: it owns memory, and it counts what it did.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch

from fngraph.binding import Assemble, Binding, assembler, bind
from fngraph.core import (
    BatchDescriptor,
    BatchSpec,
    Dispatch,
    DispatchTable,
    Explanation,
    HostBounds,
    Limits,
    Mode,
    Stats,
    dispatch,
    explain,
    key_sizes,
    trees,
)
from fngraph.core.program import run
from fngraph.core.where import user_line
from fngraph.errors import AmbientError, CaptureError, SpecError, TransformError, TreeError
from fngraph.fx.ambient import Ambient, check_modes, read
from fngraph.graphs.capture import Replay, capture, warm_up
from fngraph.graphs.recorder import Recorder, describe, make_recorder
from fngraph.graphs.ring import Ring, make_ring
from fngraph.graphs.staging import (
    StaticBuffers,
    allocate,
    check_leaves,
    true_sizes,
)
from fngraph.graphs.unpack import unpacker
from fngraph.ready import CALLED, MOST_READY, Entry, Ready, make_entry, make_ready
from fngraph.stages import Compiled

EXACT = BatchSpec(1, 1, query_len=1)  # stands for a batch that has exact shapes and no counts


@dataclasses.dataclass(frozen=True, eq=False)
class Captured:
    """A step over bound weights and state; a mapping from descriptors to replays.

    Attributes:
        outputs: static output buffers, written by every key.
        borrow: whether results are views of them, good until the next call.
        assemble: results and donated containers to `forward`'s whole output.
        replays: what has been captured.
        siblings: the step for each ambient state that calls have come under; itself for its own.
        stats: what ran, counted.
    """

    compiled: Compiled
    binding: Binding
    recorder: Recorder
    static: StaticBuffers
    constants: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    borrow: bool
    assemble: Assemble
    replays: dict[tuple[Mode, BatchDescriptor], Replay]
    stats: Stats
    entry: Entry
    ring: Ring
    ready: dict[tuple[Any, ...], Ready]
    siblings: dict[Ambient, Captured] = dataclasses.field(default_factory=dict)

    @property
    def table(self) -> DispatchTable:
        """The dispatch table."""
        return self.compiled.lowered.table

    @property
    def limits(self) -> Limits:
        """The bounds of every step."""
        return self.compiled.lowered.limits

    def dispatch(self, spec: BatchSpec) -> Dispatch:
        """What `spec` runs as."""
        return dispatch(self.table, _checked(spec))

    def explain(self, spec: BatchSpec) -> Explanation:
        """Why `spec` runs as it does, and why not as anything else."""
        return explain(self.table, _checked(spec))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step: `forward` without its held arguments.

        Raises:
            SpecError: a batch beyond the limits.
            TreeError: arguments that are not what was traced; with paths.
            AddressError: bound leaves that moved, or other donated ones.
            AmbientError: autocast, default dtype, ... have changed, and that is to be an error.
            TransformError: within a `torch.func` transform.
        """
        check_no_transform()
        return self.under_ambient()._step(args, kwargs)

    def under_ambient(self) -> Captured:
        """The step for the ambient state of now: traced and captured again, where that matters.

        Raises:
            AmbientError: it does matter, and `on_ambient="error"` was asked for.
        """
        check_modes()
        ambient = read(self.recorder.device.type)
        step = self.siblings.get(ambient)
        if step is None:
            step = self.siblings[ambient] = self._sibling(ambient)
        return step

    def _sibling(self, ambient: Ambient) -> Captured:
        lowered = self.compiled.lowered
        traced = lowered.split.traced
        again = traced if traced.serves(ambient) else traced.again()
        if again is traced:
            return self
        if traced.options.on_ambient == "error":
            raise AmbientError(
                f"ambient state is not the trace's: {traced.ambient.changes(ambient)}, and forward "
                "computes something else under it. Call under the same state, or "
                'fg.graphify(..., on_ambient="recapture")'
            )
        compiled = again.split().lower(lowered.limits).compile()
        treedefs, leaves = self.compiled.args.treedefs, self.binding.leaves
        values = [trees.unflatten(treedefs[i], leaves[s]) for i, s in self.binding.spans.items()]
        outputs = "borrow" if self.borrow else "own"
        made = bind_and_allocate(compiled, values, self.recorder, outputs)
        return dataclasses.replace(made, stats=self.stats, siblings=self.siblings)

    def _step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        entry = self.entry
        if kwargs or len(args) != entry.count:
            args = tuple(self.compiled.args.signature.values(args, kwargs, *CALLED))
        containers = {}
        for at, position, bound in entry.donated:
            value = args[at]
            if value is not bound:
                self.binding.check_argument(position, value)
            containers[position] = value
        value = args[entry.staged_at]
        batch = entry.leaves(value)
        spec = EXACT if entry.spec_field is None else getattr(value, entry.spec_field, None)
        if type(spec) is not BatchSpec:
            self._refuse_spec(spec)
        self.binding.check()
        ready = self.ready.get(spec[:7])
        if ready is None:
            ready = self._prepare(spec)
        shapes = [getattr(x, "shape", None) for x in batch]
        kinds = [(x.dtype, x.layout, x.is_meta) for x in batch] if shapes == ready.shapes else None
        if kinds != entry.kinds:
            check_leaves(self.static.plan, batch, ready.true)
        chosen = ready.chosen
        if self._is_settled():
            results = self._results(ready, batch, spec)
        else:
            with self._ambient():
                results = self._results(ready, batch, spec)
        self.stats.observe(spec[0], chosen)
        return self.assemble(results, containers)

    def host_batch(self, spec: BatchSpec) -> Any:
        """A batch in the ring's next slot, in pinned memory on CUDA: fill its leaves, and pass it.

        Its contents are whatever was last in the slot. It is good for one step, the next one.

        Raises:
            TreeError: a function without a spec, whose batches have exact shapes.
        """
        field = self.entry.spec_field
        if field is None:
            raise TreeError("host_batch needs a batch with a spec; this one has exact shapes")
        ready = self.ready.get(spec[:7]) or self._prepare(spec)
        slot = self.ring.wait()
        batch = ready.slots.get(slot)
        if batch is None:
            leaves = self.ring.leaves(slot, ready.shapes)
            batch = ready.slots[slot] = self.compiled.args.batch_over(leaves)
        filled = copy.copy(batch)
        filled.__dict__[field] = spec
        return filled

    def _prepare(self, spec: BatchSpec) -> Ready:
        """All that the counts of a batch decide, kept for the next one that has the same."""
        self.limits.check(spec)
        chosen = dispatch(self.table, spec)
        true = true_sizes(spec, self.limits.dims)
        with self._ambient():
            ready = make_ready(self.static.plan, chosen, true, self.outputs, self._cut)
        if len(self.ready) >= MOST_READY:
            self.ready.clear()
        self.ready[spec[:7]] = ready
        return ready

    def _refuse_spec(self, spec: object) -> NoReturn:
        field = self.entry.spec_field
        raise TreeError(
            f"{self.compiled.args.batch_name}.{field} is {spec!r}, not a BatchSpec. Say what the "
            f"batch holds: {field}=fg.BatchSpec(num_tokens=..., num_reqs=...)"
        )

    def _results(
        self, ready: Ready, batch: Sequence[torch.Tensor], spec: BatchSpec
    ) -> Sequence[torch.Tensor]:
        mode, key, _ = ready.chosen
        if mode is Mode.NONE:
            return self._run(batch, ready.true, spec)
        replay = ready.replay
        if replay is None:
            replay = self.replays.get((mode, key)) or self.capture_key(mode, key)
            ready.replay = replay
        self.ring.put(ready.words, batch)
        try:
            replay(ready.true, spec.host)
        except BaseException:
            self.ring.resume()
            raise
        return ready.views if self.borrow else [view.clone() for view in ready.views]

    def _is_settled(self) -> bool:
        """Whether the caller's own state is the one that steps run under."""
        return not (
            torch.is_grad_enabled()
            or torch.is_inference_mode_enabled() is not self.binding.inference
            or torch.is_autocast_enabled(self.recorder.device.type)
        )

    def _run(
        self, batch: Sequence[torch.Tensor], true: dict[str, int], spec: BatchSpec
    ) -> list[torch.Tensor]:
        """Eagerly, unpadded, on the batch's own tensors."""
        pieces = self.compiled.lowered.split.pieces
        device = self.recorder.device
        inputs = self.binding.inputs([x.to(device) for x in batch], self.constants)
        results = run(pieces.program, self.compiled.fns, inputs, true, spec.host)
        return [r.clone() if old else r for r, old in zip(results, pieces.output_aliased)]

    def capture_all(self, progress: bool = False) -> None:
        """Capture every key of the table that is not yet, largest first.

        Raises:
            CaptureError: what was captured before stays.
        """
        keys: Iterable[Any] = [key for key in self.table if key not in self.replays]
        if progress:
            from fngraph.report.progress import track

            keys = track(list(keys), f"capturing on {self.recorder.name}")
        for mode, descriptor in keys:
            self.capture_key(mode, descriptor)

    def capture_key(self, mode: Mode, descriptor: BatchDescriptor) -> Replay:
        """Capture one key on an all-padding batch, whose writes go to null slots.

        Raises:
            CaptureError: naming the key; pool and donated state are as they were.
        """
        sizes = self._sizes(descriptor)
        host = HostBounds(max_query_len=descriptor.query_len or descriptor.num_tokens)
        program, fns = self.compiled.lowered.split.program, self.compiled.fns
        inputs = self.binding.inputs(self.static.views(sizes), self.constants)
        with self._ambient():
            try:
                first = unpacker(self.static, self.ring, sizes)
                self.ring.put_padding(self.static.plan, descriptor.query_len or 0)
                try:
                    first()
                except BaseException:  # or the next step would read another slot than its own
                    self.ring.resume()
                    raise
                warm_up(self.recorder, program, fns, inputs, self._written(), sizes, host)
                replay = capture(
                    self.recorder, program, fns, self.compiled.rows, inputs, mode, descriptor,
                    sizes, host, tuple(self._cut(self.outputs, sizes)), first,
                )  # fmt: skip
            except Exception as error:  # whatever a backend or an op raises
                raise CaptureError(f"{mode} {descriptor}: {describe(error)}") from error
        self.replays[mode, descriptor] = replay
        return replay

    @contextlib.contextmanager
    def _ambient(self) -> Iterator[None]:
        """The caller's autocast and gradients change nothing: the trace has decided dtypes."""
        device = self.recorder.device.type
        with torch.inference_mode(self.binding.inference), torch.no_grad():
            if not torch.is_autocast_enabled(device):
                yield
                return
            with torch.autocast(device, enabled=False):
                yield

    def _written(self) -> list[torch.Tensor]:
        """Donated leaves that are written other than by primitives, whose slots are null."""
        rows = {row.path: row for row in self.compiled.lowered.split.traced.donation.rows}
        named = zip(self.binding.paths, self.binding.leaves)
        return [x for path, x in named if path in rows and not rows[path].null_slots]

    def _sizes(self, key: BatchDescriptor) -> dict[str, int]:
        limits = self.limits
        return key_sizes(key.num_tokens, key.num_reqs, limits.max_reqs, limits.dims)

    def _cut(self, outputs: Sequence[torch.Tensor], sizes: dict[str, int]) -> list[torch.Tensor]:
        """Leading slices of outputs, along the dims that depend on T and R."""
        dims = self.compiled.lowered.split.pieces.output_dims
        return [out[tuple(slice(d(**sizes)) for d in ds)] for out, ds in zip(outputs, dims)]

    def __getitem__(self, descriptor: BatchDescriptor) -> Replay:
        """The replay of a captured key."""
        for mode in (Mode.FULL, Mode.PIECEWISE):
            if (mode, descriptor) in self.replays:
                return self.replays[mode, descriptor]
        distance = lambda d: abs(d.num_tokens - descriptor.num_tokens)  # noqa: E731
        near = sorted((d for _, d in self.replays), key=distance)[:3]
        raise KeyError(f"{descriptor} is not captured; the nearest that are: {near}")

    def __iter__(self) -> Iterator[BatchDescriptor]:
        return iter(descriptor for _, descriptor in self.replays)

    def __len__(self) -> int:
        return len(self.replays)

    def __repr__(self) -> str:
        done = f"{len(self.replays)} of {len(self.table)} keys"
        return f"Captured({done} on {self.recorder.name}; {self.table!r})"


def check_no_transform() -> None:
    """Raise if a `torch.func` transform goes over a whole step: it would see constants.

    Raises:
        TransformError: always then.
    """
    if torch._C._are_functorch_transforms_active():
        raise TransformError(
            f"{user_line()}: a torch.func transform goes over a graphified function, whose results "
            "are constants to it. Put the transform inside: fg.graphify(torch.func.vmap(f)), or "
            "call torch.func.grad(f) in the function that is graphified"
        )


def _checked(spec: BatchSpec) -> BatchSpec:
    if not isinstance(spec, BatchSpec):
        raise SpecError(f"expected a BatchSpec, got {type(spec).__name__}. Pass batch.spec")
    return spec


def check_outputs(outputs: str) -> None:
    """Raise `TreeError` unless `outputs` says who owns results."""
    if outputs not in ("own", "borrow"):
        raise TreeError(
            f'outputs={outputs!r}: "own" (yours to keep) or "borrow" (views, good for one call)'
        )


@torch.inference_mode(False)  # graphs write these buffers, whatever mode the caller is in
def bind_and_allocate(
    compiled: Compiled, values: Sequence[Any], recorder: str | Recorder | None, outputs: str
) -> Captured:
    """A `Captured` with nothing captured yet: leaves bound, static buffers allocated.

    Raises:
        TreeError, AliasError: see `bind`. CaptureError: an unknown recorder.
    """
    check_outputs(outputs)
    lowered = compiled.lowered
    binding = bind(compiled.args, values, lowered.split.traced.out_tree)
    made = make_recorder(recorder, compiled.args.device)
    static = allocate(lowered.plan, made.device)
    pieces = lowered.split.pieces
    buffers = tuple(
        torch.zeros(
            [max(d(**lowered.plan.sizes), 0) for d in dims], dtype=dtype, device=made.device
        )
        for dims, dtype in zip(pieces.output_dims, pieces.output_dtypes)
    )
    traced = lowered.split.traced
    constants = tuple(c.to(made.device) for c in traced.constants.values())
    assemble = assembler(traced.args, traced.out_tree, traced.returns)
    return Captured(
        compiled, binding, made, static, constants, buffers, outputs == "borrow", assemble, {},
        Stats(), make_entry(compiled.args, binding, lowered.plan),
        make_ring(lowered.plan, made.device), {},
    )  # fmt: skip
