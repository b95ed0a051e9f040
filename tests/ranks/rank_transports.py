"""What the process of test_transports.py runs: torch's own collectives in functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed._symmetric_memory  # which defines its ops

import fngraph as fg


def in_place(call: Callable[[torch.Tensor], object]) -> Callable[[torch.Tensor], torch.Tensor]:
    def fn(x: torch.Tensor) -> torch.Tensor:
        call(x)
        return x

    return fn


def swallowed(x: torch.Tensor) -> torch.Tensor:
    try:
        dist.all_reduce(x)
    except RuntimeError:
        pass
    return x


def listed(x: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(x)]
    dist.all_gather(parts, x)
    return parts[0]


CALLS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "all_reduce": (in_place(dist.all_reduce), "fg.all_reduce"),
    "all_reduce, async": (
        in_place(lambda x: dist.all_reduce(x, async_op=True).wait()), "fg.all_reduce"
    ),
    "all_reduce, swallowed": (swallowed, "fg.all_reduce"),
    "all_gather": (listed, "fg.all_gather"),
    "all_to_all_single": (
        in_place(lambda x: dist.all_to_all_single(x, x.clone())), "fg.all_to_all"
    ),
    "broadcast": (in_place(lambda x: dist.broadcast(x, 0)), "fg.all_to_all"),
    "barrier": (in_place(lambda x: dist.barrier()), "fg.all_to_all"),
    "functional": (
        lambda x: functional.wait_tensor(functional.all_reduce(x, "sum", dist.group.WORLD)),
        "fg.all_reduce",
    ),
    "functional, trusted": (
        lambda x: fg.trust_rows(functional.all_reduce(x, "sum", dist.group.WORLD)),
        "fg.all_reduce",
    ),
    "functional, gathered": (
        lambda x: functional.all_gather_tensor(x, 0, dist.group.WORLD), "fg.all_gather"
    ),
    "functional, scattered": (
        lambda x: functional.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD),
        "fg.reduce_scatter",
    ),
    "symmetric memory": (
        lambda x: torch.ops.symm_mem.one_shot_all_reduce(x, "sum", dist.group.WORLD.group_name),
        "fg.all_reduce",
    ),
}  # fmt: skip


def texts(rank: int) -> dict[str, tuple[str, str]]:
    """By call: what graphify raises, and what `fg.check` has to say."""
    dist.init_process_group("gloo")
    found = {}
    for name, (call, _) in CALLS.items():

        def forward(w: Any, x: Any, call: Any = call) -> Any:
            return call(x * w)  # fmt: skip

        try:
            fg.graphify(lambda w, x: forward(w, x), stage="x")(torch.ones(2, 2), torch.ones(2, 2))
            said = "nothing"
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        report = fg.check(lambda w, x: forward(w, x), torch.ones(2, 2), torch.ones(2, 2), stage="x")
        found[name] = said, report.as_text()
    return found
