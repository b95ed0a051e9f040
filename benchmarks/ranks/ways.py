"""Ways to take a step of a model that processes share: fngraph's, and by hand with plain
`torch.distributed` collectives (`benchmarks ranks`).

fngraph's differ in what becomes of sums over processes: `fused`, each with its addition and norm is
one kernel; `sums`, a collective of `torch.distributed`'s, and a kernel for the rest; `rows`, each
process adds and norms rows of its own; `overlapped`, those with products that go at once with what
gathers or sums their rows, of 512 and more. `pieces` is compiled. By hand, a step is that of
`decode/plain.py`: what attention and mlps give is summed by `all_reduce`, logits are gathered. It
is captured as it is, or under `torch.compile`; a CPU calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

import fngraph as fg
from benchmarks.decode import plain
from benchmarks.decode.ours import greedy
from benchmarks.decode.peers import captured
from benchmarks.ranks.sharing import Task, newest, without_stands
from benchmarks.workload import BLOCK_SIZE
from fngraph.models.families import llama

OURS = (
    "FULL-sums", "FULL-fused", "FULL-rows", "FULL-pieces", "PIECEWISE-fused", "PIECEWISE-pieces"
)  # fmt: skip
OVERLAPPED = "FULL-overlapped"  # of few tokens it is FULL-rows
OF_MANY = ("FULL-sums", "FULL-fused", "FULL-rows", OVERLAPPED)
"""Of steps of many tokens."""
NEEDS_SEVERAL = ("FULL-sums", "FULL-rows", OVERLAPPED)
"""Of one process they are FULL-fused: it has nothing to sum."""
ONE_KERNEL = ("all_reduce_rms_norm",)
OWN_ROWS = ("sequence_parallel", "matmul_reduce_scatter", "all_gather_matmul")
LEFT_OUT = {"sums": (*ONE_KERNEL, *OWN_ROWS), "fused": OWN_ROWS,
            "rows": (*ONE_KERNEL, *OWN_ROWS[1:]), "overlapped": ONE_KERNEL}  # fmt: skip
"""Passes that a way goes without, of all that are shipped."""
HANDS = ("captured", "compile")
gather_into = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the name since 2.13


class Made(NamedTuple):
    """A way of one batch.

    Attributes:
        call: takes the step.
        logits: (R, V), of the last step.
        kept: k and v of each request's last token, layer by layer, (R, K, D) each.
        more: what its row says too.
    """

    call: Callable[[], Any]
    logits: Callable[[], Tensor]
    kept: Callable[[], list[Tensor]]
    more: dict[str, Any]


def captured_step(task: Task, way: str) -> tuple[Any, Any]:
    """fngraph's step of all batches, and its cache."""
    mode, level = way.split("-")
    cache, most = task.pages(), max(task.batches)
    sizes = tuple(sorted(num_reqs * task.new for num_reqs in task.batches))
    without = LEFT_OUT.get(level)
    passes = without and [one for one in fg.passes.PASSES if one.name not in without]
    fast = fg.graphify(
        greedy(llama.forward), modes=mode, donate="cache", stage="batch", sizes=sizes,
        compile="pieces" if level == "pieces" else "none",
        compile_sizes=sizes if level == "pieces" else (),
        passes=passes,
    )  # fmt: skip
    limits = fg.Limits(most * task.new, most, B=task.context // BLOCK_SIZE)
    step = fast.bind(task.params).capture(cache, limits, outputs="borrow", progress=False)
    return step, cache


def ours(task: Task, way: str) -> Iterator[tuple[int, Made]]:
    """By batch. What runs is decided for all processes before, as a plan that is broadcast does."""
    step, cache = captured_step(task, way)
    for num_reqs in task.batches:
        yield num_reqs, taken(task, step, cache, num_reqs)


def taken(task: Task, step: Any, cache: Any, num_reqs: int) -> Made:
    """The step of one batch."""
    batch = task.batch(num_reqs)
    chosen = step.dispatch(batch.spec)
    found: list[Any] = []
    sums = sum(step.stats.passes.get(name, 0) for name in (*ONE_KERNEL, OWN_ROWS[0]))

    def call() -> None:
        found[:] = step(cache, batch, allowed=chosen)

    return Made(call, lambda: found[1], lambda: newest(cache, num_reqs, task.context),
                {"ran as": str(chosen.mode), "sums matched": sums})  # fmt: skip


def by_hand(task: Task, way: str, form: str, batches: Sequence[int]) -> Iterator[tuple[int, Made]]:
    """By batch.

    Args:
        form: of attention, one of `plain.FORMS`.
        batches: of which it is the form.
    """
    weights = plain.weights_of(without_stands(task.params))
    for num_reqs in batches:
        fn: Callable[..., Any] = hand_step
        if way == "compile":
            torch.compiler.reset()
            fn = torch.compile(hand_step, fullgraph=True, dynamic=False)
        yield num_reqs, held(task, weights, fn, num_reqs, plain.FORMS[form])


def held(
    task: Task, weights: plain.Weights, fn: Callable[..., Any], num_reqs: int, attend: plain.Attend
) -> Made:
    """One batch, in a graph where there is a GPU."""
    cache, batch, found = task.rows(num_reqs), task.batch(num_reqs), list[Any]()
    config, axis = task.params.config, task.axis
    vocab = task.config.vocab_size

    def call() -> None:
        ids_positions = batch.token_ids, batch.positions
        found[:] = fn(config, weights, cache, *ids_positions, attend, axis.rank, axis.size, vocab)

    run = captured(call, torch.device(task.mesh.device), "thread_local")  # NCCL has a thread too
    kept = lambda: [x_RKSD[:, :, -1] for pair in cache for x_RKSD in pair]  # noqa: E731
    return Made(run, lambda: found[1], kept, {})


def hand_step(
    config: Any, weights: plain.Weights, cache: Sequence[plain.KV], ids_R: Tensor,
    positions_R: Tensor, attend: plain.Attend, rank: int, size: int, vocab: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One token of each request over `size` processes: the likeliest next ones, and logits."""
    positions_RT = positions_R[:, None]
    x_RTE = embedded(weights.embed, ids_R[:, None], rank, size)
    turn = plain.turn_of(config, positions_RT, x_RTE.dtype)
    room = torch.arange(cache[0][0].shape[2], device=ids_R.device)
    seen_RTS = room <= positions_RT[..., None]
    for layer, kv in zip(weights.layers, cache):
        x_RTE = plain.layer_step(
            config, layer, x_RTE, turn, kv, positions_RT, seen_RTS, attend, plain.by_group,
            lambda x: summed(x, size),
        )  # fmt: skip
    part = F.linear(plain.last_norm(config, weights, x_RTE[:, -1]), weights.head)
    logits_RV = gathered(part, size)[:, :vocab]
    return logits_RV.argmax(-1), logits_RV


def embedded(part: Tensor, ids_RT: Tensor, rank: int, size: int) -> Tensor:
    """(R, T, E), of a table whose rows are split."""
    if size == 1:
        return F.embedding(ids_RT, part)
    local = ids_RT - rank * part.shape[0]
    is_own = (local >= 0) & (local < part.shape[0])
    found = F.embedding(local.clamp(0, part.shape[0] - 1), part)
    return summed(torch.where(is_own[..., None], found, 0), size)


def summed(x: Tensor, size: int) -> Tensor:
    """Over all processes, in place."""
    if size > 1:
        dist.all_reduce(x)
    return x


def gathered(part_RV: Tensor, size: int) -> Tensor:
    """Columns of all processes, side by side."""
    if size == 1:
        return part_RV
    every = part_RV.new_empty(size * part_RV.shape[0], part_RV.shape[1])
    gather_into(every, part_RV)
    return every.unflatten(0, (size, -1)).transpose(0, 1).flatten(1)
