"""How a key is warmed and captured: ahead of the calls that need it, or by the first one.

Kernels are warmed once, not once a size: keys of one kind run the same ones. A kernel's first run
loads it, and Triton compiles users' and Inductor's kernels for a number that is 1, for one that is
divisible by 16 and for any other (ours take any: `ops/triton/launching.py`). So a kind is that of
each size, and one key of each kind, the largest, is run for real. Code that was compiled for a
range of sizes has kernels of its own, and is a kind of its own. Steps without graphs (NONE, and
attention in PIECEWISE) run at their own sizes: batches that differ are run so too, or a kernel
would be compiled in the middle of traffic; keys that are captured lazily have no such warm-up.
cuBLAS may take another kernel for another size of the same kind, which CUDA loads within a capture;
what cannot be done there makes that capture fail, and that key is then warmed and captured again.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from fngraph.core import (
    BatchSpec,
    Dispatch,
    HostBounds,
    KeyBounds,
    Limits,
    Mode,
)
from fngraph.core.collector import without_collector
from fngraph.core.dispatching import Allowed
from fngraph.core.memory import Bytes
from fngraph.core.program import run_program
from fngraph.core.spec import CLASS, Key
from fngraph.errors import CaptureError, RankError
from fngraph.executable import Executable
from fngraph.fx.generators import preserved as undrawn
from fngraph.graphs.inside import key_name
from fngraph.graphs.memory import kept, preserved
from fngraph.graphs.ranges import named_range
from fngraph.graphs.recorder import describe
from fngraph.graphs.replay import Replay, capture
from fngraph.graphs.staging.buffers import Sizes, padding_rows, true_sizes
from fngraph.graphs.staging.unpack import unpacker
from fngraph.step.agreed import after_capture, after_warming, before_capture, refusing, telling
from fngraph.step.keys import Keys
from fngraph.step.prepared import Prepared

# one key


def find_replay(keys: Keys, prepared: Prepared, spec: BatchSpec, allowed: Allowed = None) -> None:
    """Put the replay of what a batch was dispatched to into `prepared`, captured now if need be.

    Where it cannot be, the batch is one of mode NONE from now on, and the reason is counted.

    Raises:
        ModesError: it cannot be, and NONE is not allowed.
    """
    keys.check_awake()
    key = prepared.chosen.key
    replay = keys.replays.get(key) or obtain(keys, key, in_step=True)
    if replay is None:
        prepared.chosen, prepared.numbers = keys.refused(key, spec, allowed), {}
        return
    prepared.replay, prepared.calls = replay, replay.bind(prepared.true)


def obtain(keys: Keys, key: Key, *, in_step: bool = False) -> Replay | None:
    """Capture a key; None where it fails and is served eagerly, or where no memory is left for it.

    Args:
        in_step: whether it is needed now, so that others are evicted for it.
    """
    if key in keys.failed:
        return None
    keys.shared.settle()
    began = time.perf_counter_ns()
    failure = None
    try:
        for _ in range(2):  # a second time in a new pool, where the old one was too large
            if not keys.make_room(key, evict=in_step):
                return None
            replay = capture_key(keys, key)
            if keys.keep_to_budget(key, evict=in_step):
                break
            if not in_step:
                return None
    except CaptureError as error:
        failure = error
    if (failure := after_capture(keys, key, failure)) is not None:
        _refuse(keys, key, failure)
        return None
    us = (time.perf_counter_ns() - began) // 1000
    keys.shared.stats.observe_capture(*key, us, in_step)
    return replay


def capture_key(keys: Keys, key: Key) -> Replay:
    """Capture one key on an all-padding batch, whose writes go to null slots.

    Raises:
        CaptureError: naming the key; pool and donated state are as they were.
    """
    recorder = keys.shared.recorder
    watched = all(mode is not key[0] for mode, _ in keys.replays)  # the first key of its mode
    with as_captured(keys), named_range(f"capture {key_name(*key)}"):
        try:
            in_step = recorder.lazy_kernels and keys.executable.peers is not None
            if in_step or _cold(keys, [key]):  # processes do not try again one by one
                with preserved(overwritten(keys)):
                    _run_padding(keys, key)
            hoped = key not in keys.warm.values()  # another of its kind has run: mostly it does
            with recorder.recording():
                before = recorder.usage()
                try:
                    replay = _record(keys, key, watched)
                except CaptureError:
                    if not (hoped and recorder.lazy_kernels):
                        raise
                    with preserved(overwritten(keys)):
                        _run_padding(keys, key)
                    replay = _record(keys, key, watched=True)
                finally:
                    after = recorder.usage()
                    grown = max(after.pool - before.pool, 0)
                    keys.pool += grown
        except RankError as error:
            raise RankError(f"{_named(key)}{error}", error.at) from error
        except Exception as error:  # whatever a backend or an op raises
            raise _failure(key, error) from error
    graphs = after.graphs_since(before, lambda: keys.executable.estimate(*key).graph)
    keys.measured[key] = Bytes(grown, graphs)
    keys.replays[key] = replay
    return replay


@contextlib.contextmanager
def as_captured(keys: Keys) -> Iterator[None]:
    """The state of torch that keys are run and captured under; nothing is drawn from generators."""
    with keys.fixed_ambient(), undrawn(keys.executable.generators):
        yield


def _record(keys: Keys, key: Key, watched: bool) -> Replay:
    sizes, host, inputs, unpack = _operands(keys, key)
    executable = keys.executable
    return capture(
        keys.shared.recorder, *executable.program_of(key, inputs), executable.row_dims, inputs,
        *key, sizes, host, tuple(keys.cut(keys.outputs, sizes)), unpack, executable.generators,
        watched, (keys.ring,),
    )  # fmt: skip


class Operands(NamedTuple):
    """What the program of one key is called with, and the graph's first node."""

    sizes: dict[str, int]
    host: HostBounds
    inputs: list[torch.Tensor]
    unpack: Callable[[], None]


def _operands(keys: Keys, key: Key) -> Operands:
    """A key's operands, at the addresses of now; what is planned on the host is so for padding."""
    sizes = keys.executable.sizes(key[1])
    plan_padding(keys, key, sizes)
    views = keys.static.views(sizes)
    inputs = keys.shared.binding.inputs(views, keys.constants)
    unpack = unpacker(keys.static, keys.ring, sizes)
    if keys.poison is not None:
        unpack = keys.poison.after(unpack, views)
    return Operands(sizes, bounds_of(key), inputs, unpack)


def bounds_of(key: Key) -> HostBounds:
    """A key's own upper bounds; those of one graph say which key it is."""
    mode, descriptor = key
    return KeyBounds(descriptor) if mode is Mode.FULL else HostBounds(descriptor.num_tokens)


# failures


def _failure(key: Key, error: Exception) -> CaptureError:
    """`error` as the key's."""
    made = CaptureError(f"{_named(key)}{describe(error)}")
    made.__cause__ = error
    return made


def _refuse(keys: Keys, key: Key, error: CaptureError) -> None:
    """Raise `error`, or keep it as the reason why the key is served eagerly.

    Raises:
        CaptureError: by `on_failure="raise"`.
    """
    if keys.shared.rules.on_failure == "raise":
        raise error
    keys.failed[key] = str(error).removeprefix(_named(key))


def _named(key: Key) -> str:
    return f"{key[0]} {key[1]}: "


# many keys, ahead of the calls that need them


def capture_ahead(keys: Keys, wanted: Sequence[Key], progress: bool | str = False) -> None:
    """Capture these keys in order: one warm-up for each kind, then one session of the recorder."""
    with telling(keys, "capture"), without_collector():
        with refusing(keys, bool(wanted)):
            keys.check_ready()
        before_capture(keys, wanted)
        _capture_all(keys, wanted, progress)


def _capture_all(keys: Keys, wanted: Sequence[Key], progress: bool | str) -> None:
    recorder = keys.shared.recorder
    _warm_ahead(keys, [key for key in wanted if keys.fits(key)])
    with contextlib.ExitStack() as bar:
        shown: Iterable[Key] = wanted
        if progress:
            from fngraph.report.progress import track

            label = progress if isinstance(progress, str) else f"capturing on {recorder.name}"
            shown = bar.enter_context(contextlib.closing(track(list(wanted), label)))
        with recorder.recording():
            for key in shown:
                obtain(keys, key)


def _warm_ahead(keys: Keys, wanted: list[Key]) -> None:
    """Warm one key of each kind that is cold, and what steps without graphs run, saving donated
    leaves once for all of them."""
    firsts, batches = _cold(keys, wanted), _cold_batches(keys)
    if not firsts and not batches:
        return
    with as_captured(keys), contextlib.ExitStack() as held:
        failure = None
        try:
            held.enter_context(preserved(overwritten(keys)))
        except CaptureError as error:  # no memory for the copies, as each key will find for itself
            failure = error
        if _is_off(keys, "copies of donated leaves", failure):
            return
        for key in firsts:
            failure = None
            try:
                _run_padding(keys, key)
            except RankError as error:
                raise RankError(f"{_named(key)}{error}", error.at) from error
            except Exception as error:
                failure = _failure(key, error)
            if (failure := after_capture(keys, key, failure)) is not None:
                _refuse(keys, key, failure)
        for spec in batches:
            _is_off(keys, f"{spec} without a graph", _run_eager(keys, spec))
        keys.is_eager_warm = True


def _is_off(keys: Keys, what: str, failure: CaptureError | None) -> bool:
    """Whether it has failed, here or in another process; then a step that needs it says so itself.

    Raises:
        CaptureError, RankError: it has, by `on_failure="raise"`.
    """
    failure = after_warming(keys, what, failure)
    if failure is not None and keys.shared.rules.on_failure == "raise":
        raise failure
    return failure is not None


def _cold_batches(keys: Keys) -> list[BatchSpec]:
    """What to run without graphs, so that no later step compiles: a piece by `torch.compile`, for
    each kind of size that its guards tell apart, or a kernel; nothing if that has been done."""
    executable = keys.executable
    is_whole = executable.level == "stock"
    if keys.is_eager_warm or not (is_whole or compiles_kernels(keys.shared.recorder.device)):
        return []
    within, keys_hold = executable.limits, executable.plan.sizes
    if within.max_reqs > MANY_REQS:
        within = Limits(max(keys_hold["T"], 1), max(keys_hold["R"], 1))
    return unlike_batches(within, executable.query_lens, is_whole)


def compiles_kernels(device: torch.device) -> bool:
    """Whether kernels are compiled there when they are first launched."""
    return device.type != "cpu"


def _run_eager(keys: Keys, spec: BatchSpec) -> CaptureError | None:
    """Run a batch of nothing but padding as a step without graphs runs it; why it cannot be."""
    executable = keys.executable
    sizes = true_sizes(spec, executable.limits.dims)
    try:
        padding = _padding_of(keys, sizes, spec.query_len or 0)
        for planner in executable.planners:
            planner.fill(None, sizes, padding)
        leaves = [x.to(keys.shared.recorder.device) for x in padding]
        inputs = keys.shared.binding.inputs(leaves, keys.constants)
        run_program(executable.program, executable.fns, inputs, sizes, spec.bounds)
    except RankError:
        raise
    except Exception as error:
        failure = CaptureError(f"{spec}, without a graph: {describe(error)}")
        failure.__cause__ = error
        return failure
    return None


def unlike_batches(
    limits: Limits, query_lens: Iterable[int], largest: bool = False
) -> list[BatchSpec]:
    """Batches that differ in what code and kernels are chosen by: of one token, of one request, of
    more; of one query length, any power of two of them; and mixed.

    Args:
        largest: up to as many tokens as there may be, where their number matters; else few.
    """
    most = limits.max_tokens
    mixed = most if largest else min(most, limits.max_reqs + MIXED)
    made: list[tuple[int, int, int | None]] = [(1, 1, None), (mixed, 1, None)]
    made += [(mixed, min(mixed, limits.max_reqs), None)]
    for query_len in query_lens:
        reqs = min(limits.max_reqs, most // query_len)
        powers = (1 << i for i in range(reqs.bit_length()))
        made += [(n * query_len, n, query_len) for n in dict.fromkeys((*powers, reqs)) if n]
    return [BatchSpec(tokens, reqs, query_len) for tokens, reqs, query_len in made]


MANY_REQS = 1024  # an encoder's limits are above, for what may come at all: keys hold what does
MIXED = 32  # tokens more than requests: more than a kernel for few rows takes


def _cold(keys: Keys, wanted: list[Key]) -> list[Key]:
    """The first of `wanted` of each kind that has not run yet."""
    found: dict[Hashable, Key] = {}
    for key in wanted:
        found.setdefault(kind(keys.executable, key), key)
    return [key for of, key in found.items() if of not in keys.warm]


def kind(executable: Executable, key: Key) -> Hashable:
    """Equal for keys that run the same kernels, as far as one can tell without running them."""
    _, descriptor = key
    sizes = executable.sizes(descriptor)
    own = executable.one_launch_of(key) is not None and sizes["T"]  # a kernel for each
    code = tuple(x.at(sizes["T"], sizes["R"]).artefact.range for x in executable.compiled_of(key))
    return descriptor[CLASS], tuple((n == 1, n % 16 == 0) for n in sizes.values()), code, own


def _run_padding(keys: Keys, key: Key) -> None:
    """Run one key for real on an all-padding batch, whose writes go to null slots.

    Other writes land: see `preserved` and `overwritten`.
    """
    sizes, host, inputs, unpack = _operands(keys, key)
    executable = keys.executable
    with kept(keys.static.views(sizes)):  # the next batch may be there already
        try:
            keys.ring.put_padding(executable.plan, key[1].query_len or 0)
            unpack()
        except BaseException:  # or the next step would read another slot than its own
            keys.ring.resume()
            raise
        program = executable.program_of(key, inputs)
        keys.shared.recorder.warm_up(lambda: run_program(*program, inputs, sizes, host))
    keys.warm[kind(executable, key)] = key


def overwritten(keys: Keys) -> list[torch.Tensor]:
    """Donated leaves that are written other than by primitives, whose slots are null."""
    null_slots = {row.path: row.null_slots for row in keys.executable.donation.rows}
    named = zip(keys.shared.binding.paths, keys.shared.binding.leaves)
    return [x for path, x in named if not null_slots.get(path, True)]


# host-side plans of backends: made before a capture, and before each step


def plan_padding(keys: Keys, key: Key, sizes: Sizes) -> None:
    """Plan a batch of nothing but padding."""
    mode, descriptor = key
    if keys.executable.planners:
        stride = descriptor.query_len or 0
        leaves = _padding_of(keys, sizes, stride)
        for planner in keys.executable.planners:
            planner.fill(descriptor if mode is Mode.FULL else None, sizes, leaves)


def plan_step(keys: Keys, chosen: Dispatch, true: Sizes, leaves: Sequence[torch.Tensor]) -> None:
    """Plan a batch: at its key's sizes where the key is one graph, else at its own."""
    descriptor, sizes = None, true
    if chosen.mode is Mode.FULL:
        descriptor = chosen.descriptor
        sizes = keys.executable.sizes(descriptor)
    for planner in keys.executable.planners:
        planner.fill(descriptor, sizes, leaves)


def _padding_of(keys: Keys, sizes: Sizes, stride: int) -> list[torch.Tensor]:
    """The leaves of a batch of nothing but padding, in host memory."""
    buffers = [planned.buffer for planned in keys.executable.plan.buffers]
    return [padding_rows(buffer, buffer.shape(sizes), 0, stride, "cpu") for buffer in buffers]
