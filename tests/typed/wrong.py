"""Twenty wrong uses, as a user would write them: a type checker says so at each marked line."""

from __future__ import annotations

import torch
from torch import Tensor

import fngraph as fg


@fg.struct
class Batch:
    ids: Tensor = fg.buffer("T", "int64")
    spec: fg.BatchSpec = fg.host()


def forward(params: Tensor, cache: dict[str, Tensor], batch: Batch) -> Tensor:
    return params[batch.ids]


weights = torch.ones(4)
cache = {"k": torch.zeros(4)}
spec = fg.BatchSpec(3, 3)
batch = Batch(ids=weights, spec=spec)
fast = fg.graphify(forward, stage="batch", donate="cache")
step = fast.bind(weights).capture(cache, progress=False)

nothing = fg.nonsense  # wrong: no such name
fg.graphify(forward, mode="FULL")  # wrong: it is modes=
fg.graphify(forward, modes=3)  # wrong: a Mode or its name
fg.graphify(forward, donate=2.5)  # wrong: names or positions
fg.graphify(forward, sizes=4)  # wrong: a sequence
fg.graphify(forward, max_keys=None)  # wrong: a number
fg.graphify(forward, limits=5)  # wrong: fg.Limits
fg.graphify(forward, outputs=True)  # wrong: "own" or "borrow"
fg.graphify(forward, guard=True)  # wrong: it is guards=
fast(weights, cache)  # wrong: no batch
fast(weights, cache, batch, 1)  # wrong: one more
fast(weights, "cache", batch)  # wrong: not a cache
shape: int = fast(weights, cache, batch)  # wrong: forward gives a Tensor
fast.bind(weights).capture(cache, output="own")  # wrong: it is outputs=
fast.bind(weights).capture(cache, lazy="no")  # wrong: a bool
step.dispatch(3)  # wrong: a BatchSpec
step.rebinds(params=weights)  # wrong: no such method
fg.BatchSpec(num_tokens="3", num_reqs=1)  # wrong: a number
fg.check(forward, weights, cache, batch, stages="batch")  # wrong: it is stage=
fast.trace(weights, cache).lower()  # wrong: split() comes first
