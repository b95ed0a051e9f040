"""Twenty right uses, as a user would write them: a type checker has nothing to say.

Each `reveal_type` is what an editor should show; `assert_type` holds it.
"""

from __future__ import annotations

from typing import Any, assert_type

import torch
from torch import Tensor

import fngraph as fg

Cache = dict[str, Tensor]


@fg.struct
class Batch:
    ids: Tensor = fg.buffer("T", "int64")
    slots: Tensor = fg.buffer("T", "int64", pad=-1)
    lens: Tensor = fg.buffer("R", "int32", pad=0)
    spec: fg.BatchSpec = fg.host()


def forward(params: dict[str, Tensor], cache: Cache, batch: Batch) -> tuple[Tensor, Cache]:
    return params["w"][batch.ids], cache


params: dict[str, Tensor] = {"w": torch.ones(4, 4)}
cache: Cache = {"k": torch.zeros(4)}
limits = fg.Limits(max_tokens=16, max_reqs=4, B=3)
spec = fg.BatchSpec(num_tokens=3, num_reqs=3, query_len=1)
ids = torch.zeros(3, dtype=torch.int64)
batch = Batch(ids=ids, slots=ids, lens=ids.int(), spec=spec)

# 1 a function keeps its signature
fast = fg.graphify(forward, modes="FULL", donate="cache", stage="batch")
assert_type(fast(params, cache, batch), tuple[Tensor, Cache])
# 2 by name
fast(params=params, cache=cache, batch=batch)


# 3 a decorator with options
@fg.graphify(donate=1, stage="batch", sizes=(1, 2, 4), query_lens=(1, 3))
def decorated(params: Tensor, cache: Cache, batch: Batch) -> Cache:
    return cache


assert_type(decorated(params["w"], cache, batch), Cache)


# 4 a decorator without
@fg.graphify
def plain(x: Tensor) -> Tensor:
    return x + 1


assert_type(plain(ids), Tensor)
# 5 a batch without a spec, several donated
step_fn = fg.graphify(forward, donate=("cache",), stage="batch", max_keys=8, recorder="tape")
# 6 what belongs to the model
pooled = fg.graphify(forward, donate="cache", stage="batch", pooling=True, align="all", eager=False)
# 7 backends
by_name = fg.graphify(forward, stage="batch", donate="cache", backends={"attention": "reference"})
hybrid = fg.ops.Hybrid("sdpa", mixed="reference")
by_kind = fg.graphify(
    forward, stage="batch", donate="cache", backends={"attention": [hybrid, None]}
)
# 8 bound, captured: the step gives what forward gives
step = fast.bind(params).capture(cache, limits, outputs="borrow", progress=False)
assert_type(step, fg.Step[tuple[Tensor, Cache]])
assert_type(step(cache, batch), tuple[Tensor, Cache])
# 9 one call's modes
step(cache, batch, allowed=("PIECEWISE", "NONE"))
# 10 dispatch and why
assert_type(step.dispatch(spec).descriptor, fg.BatchDescriptor)
print(step.explain(spec), step.memory.total, step.stats.share("FULL"), step.notes)
# 11 stages
traced = fast.trace(fg.like(params), fg.like(cache), limits=limits)
assert_type(traced, fg.Traced)
lowered = traced.split().lower()
assert_type(lowered.compile(), fg.Compiled)
# 12 a compiled stage captured by hand
made = lowered.compile().capture(params, cache, recorder="tape", lazy=True, memory_budget=1 << 20)
# 13 keys
step.release(fg.BatchDescriptor(4, 4, 1))
step.recapture()
missing: int = step.capture_some(budget_ms=2.5)
# 14 a batch in place
filled: Any = step.host_batch(spec, slots=fg.ChangedRows(rows=ids, values=ids))
# 15 pure decisions
table = fg.core.build_table(fg.Mode.FULL, fg.core.ladders((1, 2), (1,), 2), limits)
assert_type(fg.dispatch(table, spec, allowed=("FULL", "NONE")).mode, fg.Mode)
resolution = fg.resolve("FULL", {"attention": fg.Support.ALWAYS}, limits=limits)
# 16 a check
report = fg.check(forward, params, cache, batch, donate="cache", stage="batch")
ok: bool = report.ok
# 17 a trusted value, a block, loops
trusted: Tensor = fg.trust_rows(ids)


@fg.block
def layer(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


assert_type(layer(ids, ids), Tensor)
assert_type(
    fg.while_loop(lambda c: c[0] < 3, lambda c: (c[0], c[1]), (ids, ids)), tuple[Tensor, Tensor]
)
assert_type(fg.fori_loop(0, 3, lambda i, c: c + i, ids), Tensor)
last: Tensor = fg.scan(lambda c, x: (c + x, c), ids, ids)[0]
chosen: Tensor = fg.cond(ids.sum() > 0, lambda x: x, lambda x: x + 1, ids)
# 18 a module as a function
apply, weights, buffers = fg.from_module(torch.nn.Linear(4, 4))
# 19 errors, tests, other people's models
error: type[Exception] = fg.errors.RowsError
asserts = fg.testing.assert_graph
# 20 attention
level: fg.Support = fg.ops.attention.level("FlashMLA")
