"""What two and four processes run: every collective, several dtypes and axes, donated state, as
graphs of each mode and level, beside bare `forward`. Numbers are whole, so that all is exact."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

import fngraph as fg
from fngraph.torch_facts.names import resolve_group

E = 8
BATCHES = ((3, 2), (8, 4), (1, 1), (11, 3), (5, 2))
"""T, R; the fourth is beyond all keys."""
LIMITS = fg.Limits(max_tokens=16, max_reqs=4)


@fg.struct
class Batch:
    """Padding with a row of its own."""

    x: Tensor = fg.buffer(f"T {E}", "float32")
    ids: Tensor = fg.buffer("T", "int64", pad=0, min=0)
    slot: Tensor = fg.buffer("T", "int64", pad=0, min=0)
    spec: fg.BatchSpec = fg.host()


def whole(g: torch.Generator, *shape: int) -> Tensor:
    """Small whole numbers."""
    return torch.randint(-3, 4, shape, generator=g).float()


def batch(seed: int, T: int, R: int, device: str = "cpu") -> Batch:
    """The same in each process of a seed."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 6, (T,), generator=g)
    slot = torch.randperm(11, generator=g)[:T] + 1
    x, ids, slot = (leaf.to(device) for leaf in (whole(g, T, E), ids, slot))
    return Batch(x=x, ids=ids, slot=slot, spec=fg.BatchSpec(T, R))


def params(rank: int) -> dict[str, Tensor]:
    """Each process's own."""
    g = torch.Generator().manual_seed(100 + rank)
    return {"up": whole(g, E, E), "down": whole(g, E, E), "one": whole(g, E)}


def state() -> dict[str, Tensor]:
    """Zeros; row 0 is padding's."""
    return {"rows": torch.zeros(12, E), "count": torch.zeros((), dtype=torch.int32)}


def make_forward(mesh: fg.Mesh) -> Any:
    """All of them, along "tp", and along "dp" where there is one."""
    tp = mesh["tp"]
    dp = mesh["dp"] if "dp" in mesh else tp

    def forward(params: Any, state: Any, batch: Batch) -> Any:
        h = fg.all_reduce(torch.relu(batch.x @ params["up"]), tp)
        short = fg.all_gather(h.clamp(max=100).to(torch.bfloat16), tp, 1)
        part = fg.reduce_scatter(short.float(), tp, -1)
        swapped = fg.all_to_all(h @ params["down"], dp, 1)
        least = fg.all_reduce(batch.ids + tp.rank, tp, "min")
        most = fg.all_reduce(h, dp, "max")
        seen = fg.all_reduce(batch.ids > 1 + tp.rank, tp, "max")
        every = fg.all_gather(seen[:, None], dp, dim=-1)
        narrow = fg.all_gather(batch.ids.to(torch.int16)[:, None, None].expand(-1, 2, 3), tp, 1)
        true = (batch.slot > 0)[:, None]
        total = fg.all_reduce(torch.where(true, h, 0).sum(0), dp)
        ones = fg.all_gather(params["one"] + dp.rank, dp)
        row = fg.reduce_scatter(params["one"].repeat(tp.size), tp) + total
        rows = state["rows"].index_put((batch.slot,), h + 1)
        state = {"rows": rows, "count": state["count"] + 1}
        made = (h, short, part, swapped, least, most, seen, every, narrow, total, ones, row)
        return made, state

    return forward


DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int8, torch.uint8, torch.bool, torch.int16, torch.complex64, torch.float8_e5m2,
)  # fmt: skip


def untrue(axis: fg.Axis, device: str) -> list[Any]:
    """Collectives that do not give what all processes' tensors, which each can make, say."""
    wrong: list[Any] = []
    for dtype in DTYPES:
        made = [whole(torch.Generator().manual_seed(i), 4, 6, 2) for i in range(axis.size)]
        given = [x.abs().to(device).to(dtype) for x in made]
        own, reduces = given[axis.rank], dtype not in (torch.int16, torch.float8_e5m2)
        pairs: dict[str, tuple[Any, Any]] = {}
        for dim in (0, 1, -1):
            parts = [x.chunk(axis.size, dim)[axis.rank] for x in given]
            pairs[f"gather {dim}"] = fg.all_gather(own, axis, dim), torch.cat(given, dim)
            pairs[f"exchange {dim}"] = fg.all_to_all(own, axis, dim), torch.cat(parts, dim)
            if reduces and dtype is not torch.bool:
                summed = torch.stack(parts).sum(0).to(dtype)
                pairs[f"scatter {dim}"] = fg.reduce_scatter(own, axis, dim), summed
        if reduces and dtype is not torch.bool:
            pairs["sum"] = fg.all_reduce(own, axis), torch.stack(given).sum(0).to(dtype)
        if reduces and not dtype.is_complex:
            pairs["max"] = fg.all_reduce(own, axis, "max"), torch.stack(given).amax(0)
            pairs["min"] = fg.all_reduce(own.mT, axis, "min"), torch.stack(given).amin(0).mT
        for name, (got, want) in pairs.items():
            same = got.dtype == dtype and got.is_contiguous() and got.shape == want.shape
            if not (same and bool((got.to(torch.complex64) == want.to(torch.complex64)).all())):
                wrong.append((dtype, name))
    return wrong


def on(device: str, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same there."""
    return {name: x.to(device) for name, x in leaves.items()}


def backend_of(group: Any) -> Any:
    """What a group moves the CPU's tensors by."""
    return group._get_backend(torch.device("cpu"))


def steps(
    rank: int, sizes: dict[str, int], modes: tuple[str, ...], device: str = "cpu"
) -> dict[str, Any]:
    """Whether each step's bits are bare forward's, by mode."""
    warnings.simplefilter("ignore")
    mesh = fg.make_mesh(device, timeout=60, **sizes)
    forward, found = make_forward(mesh), {}
    found["untrue"] = [untrue(axis, mesh.device) for axis in mesh.axes]
    weights = on(mesh.device, params(rank))
    groups = [resolve_group(axis.group) for axis in mesh.axes]
    found["mesh"] = repr(mesh)
    found["waits"] = [backend_of(group).options._timeout.total_seconds() for group in groups]
    for mode in modes:
        bound, bare = on(mesh.device, state()), on(mesh.device, state())
        fast = fg.graphify(forward, donate="state", stage="batch", modes=mode, sizes=(4, 8))
        step = fast.bind(weights).capture(bound, LIMITS, guards=True, progress=False)
        wrong: list[Any] = []
        ran = set()
        for i, (T, R) in enumerate((*BATCHES, BATCHES[0])):
            one = batch(i, T, R, mesh.device)
            want, bare = forward(weights, bare, one)
            got, _ = step(bound, one)
            ran.add(str(step.dispatch(one.spec).mode))
            same = [torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(got, want)]
            same.append(torch.equal(bound["rows"][1:], bare["rows"][1:]))
            same.append(torch.equal(bound["count"], bare["count"]))
            wrong += [] if all(same) else [(i, same)]
        found[mode] = (wrong, sorted(ran))
    return found


def compiled(rank: int) -> dict[str, Any]:
    """A piece with collectives by Inductor: twice, the second time from the disk."""
    warnings.simplefilter("ignore")
    tp = fg.make_mesh("cpu", timeout=100, tp=2)["tp"]

    def forward(w: Tensor, x: Tensor) -> Any:
        a = torch.relu(x) * 2
        b = fg.all_reduce(x * w, tp)
        c = fg.all_reduce(x + w, tp)
        d = fg.all_gather(fg.all_reduce(x * w, tp) + a, tp, 1)
        other = fg.all_gather(b, tp, 1)[:, :E]
        return d, c + a + other

    w, found = params(rank)["one"], {}
    for when in ("first", "again"):
        fast = fg.graphify(forward, stage="x", modes="FULL", compile="once")
        x = batch(0, 6, 1).x
        step = fast.trace(w, batch=x).split().lower().compile().capture(w)
        same = [torch.equal(a, b) for a, b in zip(step(x), forward(w, x))]
        (piece,) = step.main.executable.compiled
        found[when] = all(same), [one.loaded for one in piece.made]
        found["code"] = piece.made[0].made.path
    return found
