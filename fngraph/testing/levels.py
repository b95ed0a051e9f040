"""One capture of a key, replayed on every batch that the key serves: what a level is proved by."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from fngraph.core import BatchDescriptor, Support
from fngraph.graphs.recorder import Recorder
from fngraph.ops import ATTENTION, Backend
from fngraph.ops.backend import Planner
from fngraph.testing.cases import NAN, Case, case


def serves(level: Support, query_len: int | None) -> bool:
    """Whether one graph may serve all batches of this query length; None: mixed ones."""
    least = {None: Support.ALWAYS, 1: Support.UNIFORM_SINGLE_TOKEN_DECODE}
    return level >= least.get(query_len, Support.UNIFORM_BATCH)


def key_of(num_reqs: int, query_len: int | None, num_tokens: int) -> BatchDescriptor:
    """A key of a uniform batch, or, with `num_tokens`, of a mixed one."""
    return BatchDescriptor(num_reqs * query_len if query_len else num_tokens, num_reqs, query_len)


def padding(key: BatchDescriptor, **options: Any) -> Case:
    """A key's static buffers with nothing but padding in them; `options` are those of `case`."""
    return _fill(key, [], **options)


def batches(
    key: BatchDescriptor, seeds: Iterable[int], longest: int, **more: Any
) -> Iterator[Case]:
    """Batches that the key serves, padded to it, of requests of up to `longest` tokens."""
    for seed in seeds:
        chance = random.Random(seed)
        new, left = [], key.num_tokens
        for _ in range(chance.randint(1, key.num_reqs or left)):
            n = key.query_len or chance.choice((1, 1, 2, left))
            if 1 <= n <= left:
                new.append(n)
                left -= n
        rows = [(n, chance.randint(0, longest - n)) for n in new]
        yield _fill(key, rows, seed=seed, **more)


def _fill(key: BatchDescriptor, rows: list[tuple[int, int]], **more: Any) -> Case:
    return case(
        *rows, pad_tokens=key.num_tokens - sum(n for n, _ in rows),
        pad_reqs=(key.num_reqs or 0) - len(rows), query_len=key.query_len or 0, **more,
    )  # fmt: skip


def planner_of(backend: Backend, c: Case, config: Any) -> Planner | None:
    """What plans the calls of a backend over arguments of these shapes, if it plans at all."""
    if backend.plan is None:
        return None
    names = [argument.name for argument in ATTENTION.op._schema.arguments]
    read = tuple(names.index(name) for name in backend.plan.leaves)
    sizes = {"T": len(c.q), "R": len(c.meta.seq_lens), "B": c.meta.block_tables.shape[1]}
    return Planner(backend.name, backend.plan, config, read, backend.plan.leaves, sizes)


def planned(planner: Planner | None, key: BatchDescriptor | None, leaves: Sequence[Tensor]) -> Any:
    """Plan a call; what `run` gets for it as `args.plan`."""
    if planner is None:
        return None
    planner.fill(key, planner.most, [x.cpu() for x in leaves])
    return planner.buffers(key)


def replays(
    run: Callable[[], Any], static: Case, out: Tensor, given: Iterable[Case], recorder: Recorder,
    plan: Callable[[Case], Any] = lambda c: None,
) -> Iterator[Case]:  # fmt: skip
    """Record `run`, from `static` into `out`; replay it on each batch, which is yielded after that.

    Args:
        plan: called before each replay with its batch.

    Raises:
        CaptureError: `run` does what no graph can hold.
    """
    run()
    recorder.warm_up(run)
    recording, _ = recorder.record(run)
    for c in given:
        static.load(c)
        out.fill_(NAN)
        plan(c)
        recording.replay()
        yield c
