"""What each process of test_sharded.py runs, by torchrun: every family's part of it, over the same
steps in every mode, its logits into a file.

    torchrun --nproc-per-node 2 tests/ranks/sharded_models.py FOLDER SECONDS
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import fngraph as fg
from fngraph.models import generate, loading, naming

BLOCKS, BLOCK_SIZE = 4, 16  # of a request
LIMITS = fg.Limits(64, 4, B=BLOCKS)
TEXTS = [
    [(i * 37 + j * j * 11) % 251 for j in range(BLOCKS * BLOCK_SIZE)] for i in range(3)
]  # of three requests
Span = tuple[int, int, int]  # request, first token, last + 1
STEPS: list[list[Span]] = [  # prefills, single tokens of all, some of both
    [(0, 0, 26), (1, 0, 5)],
    [(0, 26, 27), (1, 5, 6)],
    [(1, 6, 7), (0, 27, 28), (2, 0, 7)],
    [(0, 28, 29), (1, 7, 8), (2, 7, 8)],
    [(2, 8, 20), (0, 29, 30)],
]
MESHES = {2: ({"tp": 2}, {"ep": 2}), 4: ({"tp": 4}, {"tp": 2, "ep": 2})}


class Made(NamedTuple):
    """A model: its family, its params, whole or a process's part, and what is called."""

    family: Any
    params: Any

    def new_cache(self) -> Any:
        """A cache in which reading what was never written shows."""
        cache = self.family.init_cache(
            self.params.config, BLOCKS * len(TEXTS), block_size=BLOCK_SIZE, num_slots=len(TEXTS),
            dtype=self.params.embed.dtype,
        )  # fmt: skip
        for x in naming.named(cache).values():
            x.fill_(torch.nan)
        return cache


def batch_of(Batch: Any, spans: Sequence[Span]) -> Any:
    """A step's tokens; request i has its own blocks and its own slot."""
    lengths = torch.tensor([end - first for _, first, end in spans])
    positions = torch.cat([torch.arange(first, end) for _, first, end in spans])
    of = torch.tensor([i for i, *_ in spans]).repeat_interleave(lengths)
    ends = lengths.cumsum(0)
    leaves = {
        "token_ids": torch.tensor([t for i, first, end in spans for t in TEXTS[i][first:end]]),
        "positions": positions,
        "slot_mapping": of * BLOCKS * BLOCK_SIZE + positions,
        "seq_lens": torch.tensor([end for *_, end in spans], dtype=torch.int32),
        "query_start_loc": torch.tensor([0, *ends.tolist()], dtype=torch.int32),
        "block_tables": torch.tensor(
            [[i * BLOCKS + b for b in range(BLOCKS)] for i, *_ in spans], dtype=torch.int32
        ),
        "state_slots": torch.tensor([i for i, *_ in spans]),
        "logits_indices": ends - 1,
    }
    query_len = 1 if bool((lengths == 1).all()) else None
    return generate.select(Batch, leaves, fg.BatchSpec(len(of), len(spans), query_len=query_len))


@torch.no_grad()
def bare(made: Made) -> list[Tensor]:
    """The logits of each step, of bare `forward`."""
    cache, found = made.new_cache(), []
    for spans in STEPS:
        logits_RV, cache = made.family.forward(
            made.params, cache, batch_of(made.family.Batch, spans)
        )
        found.append(logits_RV.clone())
    return found


def in_graphs(made: Made, **options: Any) -> tuple[list[Tensor], list[Tensor], list[str]]:
    """The logits of each step in graphs, and as the traced program in mode NONE; and the modes."""
    cache = made.new_cache()
    fast = fg.graphify(
        made.family.forward, modes="FULL_AND_PIECEWISE", donate="cache", stage="batch",
        sizes=(4, 32), recorder="tape", **options,
    )  # fmt: skip
    step = fast.bind(made.params).capture(cache, LIMITS, progress=False)
    both, modes = [], []
    for allowed in (None, ("NONE",)):
        found = []
        for x in naming.named(cache).values():
            x.fill_(torch.nan)
        for spans in STEPS:
            batch = batch_of(made.family.Batch, spans)
            modes.append(step.dispatch(batch.spec, allowed=allowed).mode.name)
            logits_RV, cache = step(cache, batch, allowed=allowed)
            found.append(logits_RV)
        both.append(found)
    return both[0], both[1], modes


def meshes(world: int) -> Iterator[tuple[str, fg.Mesh]]:
    """By name, those of so many processes."""
    for sizes in MESHES[world]:
        yield (
            "_".join(f"{name}{size}" for name, size in sizes.items()),
            fg.make_mesh("cpu", **sizes),
        )


def main(folder: Path, graphs: Sequence[str]) -> None:
    """Each family over each mesh that it can be split over."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    found: dict[Any, Any] = {}
    try:
        for kind, mesh in meshes(dist.get_world_size()):
            for path in sorted(folder.iterdir()):
                if not path.is_dir():
                    continue
                family = loading.family(path)
                sizes = family.specs(loading.read_config(family.FORMAT, path)).sizes
                if "tp" not in mesh and "ep" not in {size.axis for size in sizes.values()}:
                    continue
                began = time.perf_counter()
                made = Made(family, family.load(path, mesh=mesh)[1])
                found[kind, path.name, "bare"] = bare(made)
                if path.name in graphs or "all" in graphs:
                    full, none, modes = in_graphs(made)
                    found |= {(kind, path.name, "graphs"): full, (kind, path.name, "none"): none}
                    found[kind, path.name, "modes"] = modes
                if dist.get_rank() == 0:
                    print(kind, path.name, round(time.perf_counter() - began, 2), flush=True)
        torch.save(found, folder / f"{dist.get_world_size()}.{dist.get_rank()}.pt")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
