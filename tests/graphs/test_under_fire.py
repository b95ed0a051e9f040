"""Staging under fire: the device late, the host ahead and rewriting at once, every leaf summed.

Mode, key and the way a batch is given change from step to step. The graph itself weighs each
element of each padded leaf by its position; what it should have seen is computed on the host, by
the fields' pad rules, from a copy that nothing rewrites.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
import toys
from torch import Tensor

import fngraph as fg

B, TOP, MAX_T, MAX_R, PAD = 3, 32, 40, 8, 5
LIMITS = fg.Limits(MAX_T, MAX_R, B=B)
SIZES = (1, 2, 4, 8, 16, TOP)
FIFTY_MS = int(50e-3 * 1.7e9)  # cycles of an H200
KINDS = ("host_batch", "host", "pinned", "device", "mixed")
LEAVES = ("ids", "slots", "x", "lens", "starts", "tables", "held")


@fg.struct
class Batch:
    """A leaf of each shape and kind of pad."""

    ids: Tensor = fg.buffer("T", "int64")
    slots: Tensor = fg.buffer("T", "int64", pad=-1)
    x: Tensor = fg.buffer("T 2", "float32")
    lens: Tensor = fg.buffer("R", "int32", pad=0)
    starts: Tensor = fg.buffer("R + 1", "int32", pad="stride")
    tables: Tensor = fg.buffer("R B", "int32", pad=PAD)
    held: Tensor = fg.buffer("R B", "int32", pad=0, rows="changed")
    spec: fg.BatchSpec = fg.host()


def weighed(leaf: Tensor) -> Tensor:
    """The sum of (element + 1) * weight: a row more or less, swapped or of another step shows."""
    flat = leaf.reshape(leaf.shape[0], -1).long() + 1
    row = torch.arange(leaf.shape[0], device=leaf.device)[:, None] * 7919 + 1
    column = torch.arange(flat.shape[1], device=leaf.device) * 104729 + 1
    return (flat * row * column).sum()


def forward(seed: Tensor, state: Any, batch: Batch) -> Any:
    """Sums of four leaves before a primitive, of its result and of four leaves after it."""
    trust = fg.trust_rows
    early = [weighed(trust(x)) for x in (batch.ids, batch.x, batch.lens, batch.tables)]
    doubled = toys.double(batch.x)  # in PIECEWISE the rest of its rows is zero, as those of x are
    known = torch.where(batch.lens[:, None] > 0, batch.held, 0)
    late = [weighed(trust(x)) for x in (doubled, batch.slots, batch.starts, known, batch.lens)]
    sums = trust(torch.stack([*early, *late])) + seed
    log = state["log"] * 31 + sums
    return sums, log + 0, batch.ids * 3 + batch.slots, {"log": log}


def given(draw: random.Random, n: int) -> dict[str, Any]:
    """The leaves of step n with their spec, but for `held`; no two steps are alike."""
    query_len = draw.choice([None, None, 1, 1, 2])
    if query_len:
        R = draw.randint(1, MAX_R)
        counts = [query_len] * R
    else:
        T = draw.choice([draw.randint(1, TOP), draw.randint(1, 8), draw.randint(TOP + 1, MAX_T)])
        R = draw.randint(1, min(T, MAX_R))
        cuts = sorted(draw.sample(range(1, T), R - 1))
        counts = [b - a for a, b in zip([0, *cuts], [*cuts, T])]
    T = sum(counts)
    generator = torch.Generator().manual_seed(n)
    ints = lambda *shape: torch.randint(1, 1 << 20, shape, generator=generator)  # noqa: E731
    return {
        "ids": ints(T), "slots": ints(T), "x": ints(T, 2).float(), "lens": ints(R).int(),
        "starts": torch.tensor([0, *counts]).cumsum(0).int(), "tables": ints(R, B).int(),
        "spec": fg.BatchSpec(T, R, query_len=query_len),
    }  # fmt: skip


def padded(leaves: dict[str, Any], step: Any) -> dict[str, Tensor]:
    """What the key's graph is to see, by the pad rules as the README states them."""
    mode, key, _ = step.dispatch(leaves["spec"])
    T, R = leaves["spec"].num_tokens, leaves["spec"].num_reqs
    if mode is fg.Mode.NONE:
        return {name: leaves[name] for name in LEAVES}
    top_T = key.num_tokens
    top_R = min(top_T, MAX_R) if key.num_reqs is None else key.num_reqs
    assert top_T >= T and top_R >= R
    more = lambda x, rows, pad: torch.cat([x, x.new_full((rows, *x.shape[1:]), pad)])  # noqa: E731
    stride = key.query_len or 0
    starts = [*leaves["starts"].tolist(), *(T + stride * i for i in range(1, top_R - R + 1))]
    return {
        "ids": more(leaves["ids"], top_T - T, 0),
        "slots": more(leaves["slots"], top_T - T, -1),
        "x": more(leaves["x"], top_T - T, 0),
        "lens": more(leaves["lens"], top_R - R, 0),
        "starts": torch.tensor(starts, dtype=torch.int32),
        "tables": more(leaves["tables"], top_R - R, PAD),
        "held": more(leaves["held"], top_R - R, 0),
    }


def wanted(seen: dict[str, Tensor]) -> Tensor:
    """The sums, in `forward`'s order."""
    doubled = {**seen, "doubled": seen["x"] * 2}
    order = ("ids", "x", "lens", "tables", "doubled", "slots", "starts", "held", "lens")
    return torch.stack([weighed(doubled[name]) for name in order]) + 1


class Sender:
    """Passes a step's leaves in one of several ways, from memory that it writes again and again."""

    def __init__(self, step: Any, device: Any) -> None:
        self.step, self.device, self.calls = step, device, 0
        shapes = {"ids": (MAX_T,), "slots": (MAX_T,), "x": (MAX_T, 2), "lens": (MAX_R,),
                  "starts": (MAX_R + 1,), "tables": (MAX_R, B)}  # fmt: skip
        dtypes = {"ids": torch.int64, "slots": torch.int64, "x": torch.float32}
        make = lambda **to: {  # noqa: E731
            n: torch.zeros(s, dtype=dtypes.get(n, torch.int32), **to) for n, s in shapes.items()
        }
        pin = torch.device(device).type == "cuda"
        self.memory = {
            "host": make(),
            "pinned": make(pin_memory=pin),
            "device": make(device=device),
        }

    def __call__(self, kind: str, leaves: dict[str, Any], state: Any) -> Any:
        """One step; what was passed is garbage as soon as it has returned."""
        rows, where = leaves["rows"], "device" if kind == "device" else "host"
        held = self.on(leaves, where, "held" if rows is None else "values").clone()
        changed = held if rows is None else fg.ChangedRows(rows, held)
        passed = {}
        if kind == "host_batch":
            told = {} if rows is None else {"held": changed}
            batch = self.step.host_batch(leaves["spec"], **told)
            for name in LEAVES if rows is None else LEAVES[:-1]:
                getattr(batch, name).copy_(leaves[name])
        else:
            for i, name in enumerate(LEAVES[:-1]):
                ways = ("host", "device", "pinned")
                where = ways[(i + self.calls) % 3] if kind == "mixed" else kind
                passed[name] = self.memory[where][name][: len(leaves[name])]
                passed[name].copy_(self.on(leaves, where, name))
            batch = Batch(**passed, held=changed, spec=leaves["spec"])
        got = self.step(state, batch)
        for x in (*passed.values(), held):
            x.fill_(-7)
        self.calls += 1
        return got

    @staticmethod
    def on(leaves: dict[str, Any], where: str, name: str) -> Tensor:
        """A leaf from where it can be copied without waiting for the device."""
        return leaves["on device"][name] if where == "device" else leaves[name]


def traffic(steps: int, seed: int, device: Any) -> list[dict[str, Any]]:
    """The leaves of so many steps, on the host and on the device; a table whose rows change."""
    draw, table, known, made = random.Random(seed), torch.zeros(MAX_R, B).int(), 0, []
    for n in range(steps):
        leaves = given(draw, n)
        R = leaves["spec"].num_reqs
        rows = [*range(known, R)]
        rows += draw.sample(range(min(known, R)), draw.randint(0, min(known, R)))
        draw.shuffle(rows)
        whole = n == 0 or draw.random() < 0.1
        rows = torch.tensor([*range(R)] if whole else rows, dtype=torch.int64)
        table[rows] = torch.randint(1, 1 << 20, (len(rows), B)).int()
        known = max(known, R)
        leaves |= {"held": table[:R].clone(), "values": table[rows]}
        moved = {k: x.to(device, copy=True) for k, x in leaves.items() if k != "spec"}
        made.append({**leaves, "rows": None if whole else rows, "on device": moved})
    return made


def make(recorder_name: str, device: Any, modes: str) -> tuple[Any, Any]:
    """The step and its state."""
    one = torch.ones(1, dtype=torch.int64, device=device)
    state = {"log": torch.zeros(9, dtype=torch.int64, device=device)}
    fast = fg.graphify(
        forward, modes=modes, donate="state", stage="batch", sizes=SIZES, query_lens=(1, 2),
        recorder=recorder_name,
    )  # fmt: skip
    return fast.bind(one).capture(state, LIMITS, progress=False), state


@pytest.mark.sampled(1)
@pytest.mark.parametrize("modes", ["FULL_AND_PIECEWISE", "FULL"])
def test_every_checksum_is_right(recorder_name, device, modes: str):
    steps = 1000 if recorder_name == "cuda" else 300
    step, state = make(recorder_name, device, modes)
    send, draw, inputs = Sender(step, device), random.Random(4), traffic(steps, 3, device)
    kinds = [draw.choice(("host_batch", *KINDS)) for _ in inputs]
    results = []
    for n, (kind, leaves) in enumerate(zip(kinds, inputs)):
        if recorder_name == "cuda" and (n < 3 or n % 100 == 50):
            torch.cuda._sleep(FIFTY_MS)
        *got, state = send(kind, leaves, state)
        results.append(got)  # on the device: nothing waits for it before the last step

    ran: Counter[Any] = Counter()
    log = torch.zeros(9, dtype=torch.int64)
    for n, (kind, leaves, (sums, after, tokens)) in enumerate(zip(kinds, inputs, results)):
        want, (mode, key, _) = wanted(padded(leaves, step)), step.dispatch(leaves["spec"])
        log = log * 31 + want
        where = f"step {n}, {mode} {key}, {kind}"
        assert sums.tolist() == want.tolist(), where
        assert after.tolist() == log.tolist(), where
        assert tokens.tolist() == (leaves["ids"] * 3 + leaves["slots"]).tolist(), where
        ran[mode.name, kind] += 1
    assert state["log"].tolist() == log.tolist()

    names = {"FULL", "PIECEWISE", "NONE"} if modes != "FULL" else {"FULL", "NONE"}
    assert {mode for mode, _ in ran} == names and len(ran) == len(KINDS) * len(names)
    shares = [step.stats.share(name) for name in names]
    assert step.stats.steps == steps and sum(shares) == pytest.approx(1) and min(shares) > 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", [toys.FULL, toys.PIECEWISE, toys.NONE])
def test_the_host_is_ahead_of_the_device(mode: fg.Mode, kind: str):
    """Two steps return while the device is still busy: else nothing above was under fire."""
    step, state = make("cuda", "cuda", "FULL_AND_PIECEWISE")
    send, inputs = Sender(step, "cuda"), traffic(40, 3, "cuda")
    for leaves in inputs:  # what is done once is done
        send(kind, leaves, state)
    late = torch.cuda.Event()
    two = [x for x in inputs if step.dispatch(x["spec"]).mode is mode][:2]
    assert len(two) == 2
    torch.cuda.synchronize()
    torch.cuda._sleep(4 * FIFTY_MS)
    late.record()
    for leaves in two:
        send(kind, leaves, state)
    assert not late.query()
    torch.cuda.synchronize()
