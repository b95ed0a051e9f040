"""`python -m benchmarks launch`: on which shapes it measures, what it makes of clocks and asks."""

from __future__ import annotations

import argparse
import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import fngraph as fg
from benchmarks import harness, launch
from benchmarks.decode.models import MODELS
from benchmarks.launch import attending, beside, kernels, mixes, turns
from fngraph.core import Work

PREDICTED = ("1B", "8B")


def weights_of(config: Any) -> set[tuple[int, int]]:
    """(columns, depth) of a Llama's products."""
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    E, F = config.dim, config.mlp_dim
    return {(q, E), (kv, E), (E, q), (F, E), (E, F), (config.vocab_size, E)}


@pytest.mark.parametrize("name", PREDICTED)
def test_constants_are_of_other_shapes(name: str) -> None:
    config = MODELS[name].config
    sizes = kernels.WHOLE
    assert not weights_of(config) & set(itertools.product(sizes.columns, sizes.depth))
    assert {n for pair in weights_of(config) for n in pair}.isdisjoint((sizes.width, mixes.E))
    tokens = launch.measure.flags["--tokens"]["default"]
    assert set(tokens).isdisjoint(set(sizes.rows) - {1})  # of one row there is one number alone
    assert set(tokens).isdisjoint({*attending.WHOLE.chunks, *attending.WHOLE.reqs} - {1})
    heads = [(one.queries, one.keys) for one in attending.WHOLE.heads]
    assert (config.num_heads, config.num_kv_heads) not in heads


@pytest.mark.parametrize("name", PREDICTED)
def test_they_bracket_what_is_predicted(name: str) -> None:
    config, sizes = MODELS[name].config, kernels.WHOLE
    for columns, depth in weights_of(config):
        assert sizes.columns[0] <= columns
        assert sizes.depth[0] <= depth <= sizes.depth[-1]
    assert sizes.rows[0] == 1 and sizes.rows[-1] > 8192
    assert config.head_dim in {one.width for one in attending.WHOLE.heads}


COSTS = {"view": 1.5, "pointwise": 4.0, "broadcast": 4.5, "reduction": 7.0, "cat": 6.0,
         "index": 9.0, "product": 11.0}  # fmt: skip
MADE: dict[str, tuple[str, ...]] = {
    "pointwise": ("pointwise",), "broadcast": ("broadcast",), "view": ("view", "view"),
    "reduction": ("reduction", "broadcast"), "cat": ("view", "view", "cat"),
    "index": ("index", "pointwise"), "product": ("view", "product"),
}  # fmt: skip
STEP, EAGER, NODE, GAP, EACH = 30.0, 60.0, 0.02, 0.5, 1.25


def law(monkeypatch: pytest.MonkeyPatch, slower: Callable[[int], float]) -> None:
    """Mixes that take what is written above, on a host whose bursts take so many times as long."""
    bursts = itertools.count()

    def mix(names: Sequence[str], device: str) -> mixes.Mix:
        works = tuple(
            Work(kind, kernels=int(kind != "view")) for name in names for kind in MADE[name]
        )
        return mixes.Mix(lambda: ("FULL", works), lambda: ("NONE", works), works)

    def device_us(call: Callable[[], Any], device: str, bursts: int = 1) -> float:
        mode, works = call()
        count = sum(work.kernels for work in works)
        return 9.0 + count * EACH if mode == "FULL" else count * (EACH + GAP)

    def clocked(call: Callable[[], Any], device: str, bursts: int = 1) -> mixes.Clocked:
        mode, works = call()
        assert mode == "FULL"  # hosts in NONE are compared, and take turns
        count = sum(work.kernels for work in works)
        return mixes.Clocked(STEP + count * NODE, device_us(call, device))

    def host_us(made: Any, ids: Any) -> list[float]:
        _, works = made.step(ids)
        us = EAGER + sum(COSTS[work.kind] for work in works)
        return [us * slower(next(bursts))] * 3

    monkeypatch.setattr(mixes, "mix", mix)
    monkeypatch.setattr(mixes, "clocked", clocked)
    monkeypatch.setattr(mixes, "device_us", device_us)
    monkeypatch.setattr(mixes.clocks, "host_us", host_us)


MIXES = 1 + len(mixes.OPS)
HOSTS: dict[str, tuple[Callable[[int], float], float]] = {
    "as fast all the time": (lambda burst: 1.0, 1.0),
    "half as fast from a round on": (lambda burst: 1.0 + (burst >= 10 * MIXES), 2.0),
    "slower in every round": (lambda burst: 1.0 + burst // MIXES / 12, 2.0),
    "busy within some rounds": (lambda burst: 1.7 if burst % 31 == 0 else 1.0, 1.0),
}


@pytest.mark.parametrize("name", HOSTS)
def test_what_an_op_costs_is_found_from_mixes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slower, by = HOSTS[name]
    law(monkeypatch, slower)
    found = mixes.steps("cpu", blocks=2)
    assert found.op_us == pytest.approx({kind: us * by for kind, us in COSTS.items()}, rel=0.02)
    assert found.eager_us == pytest.approx(EAGER * by, rel=0.02)
    assert found.full_us == pytest.approx(STEP + NODE)
    assert found.node_us == pytest.approx(NODE)
    assert found.gap_us == pytest.approx(GAP)
    works, us = found.mixed
    assert us == pytest.approx(EACH * sum(work.kernels for work in works))
    assert "product" not in {work.kind for work in works}


def test_a_layer_costs_what_it_would_have_when_ops_were_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    law(monkeypatch, lambda burst: 1.0)
    found = mixes.steps("cpu", blocks=1)
    monkeypatch.setattr(mixes.clocks, "host_us", lambda made, ids: [1.7 * made.step(ids)])

    def layers_of(count: int) -> Any:
        each = {"NONE": 25.0, "PIECEWISE": 12.0}
        call = lambda batch, mode: 40.0 + count * each[mode]  # noqa: E731
        return attending.Layers(call, lambda batch: None, Counter())

    found = found._replace(none=lambda: found.none_us)
    few, many = layers_of(attending.FEW), layers_of(attending.MANY)
    batch: Any = None
    assert attending.hosts_us(few, many, batch, found, "cpu", 3) == pytest.approx((25.0, 12.0))


def test_weights_are_others_call_after_call_and_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[list[int]] = []

    def each_us(fns: Sequence[Any], device: str) -> float:
        read.append([fn.__closure__[0].cell_contents.data_ptr() for fn in fns])
        return 1.0 + len(read)

    monkeypatch.setattr(kernels, "_calls", lambda us, nbytes: 4)
    monkeypatch.setattr(kernels, "each_us", each_us)
    sizes = kernels.Sizes((1,), (32, 64), (32,), (1,), 8, 8)
    grid = kernels.products(sizes, "cuda" if torch.cuda.is_available() else "cpu")
    assert grid.us == (2.0, 3.0)  # columns vary before rows, depth before columns
    small, _ = read
    assert all(at % 16 == 0 for at in small) and len(set(small)) == 2


@pytest.mark.gpu
def test_on_a_gpu_constants_are_the_devices(tmp_path: Path) -> None:
    kept, figures = tmp_path / "constants.json", tmp_path / "launch.json"
    harness.main(["launch", "--tiny", "--constants", str(kept), "--json", str(figures)])
    constants = fg.core.Constants.loads(kept.read_text())
    device, host = constants.device, constants.host
    assert device.name == torch.cuda.get_device_name()
    assert 0.3 < device.kernel_us < 20 and device.bytes_per_us > 1e5
    assert 0 < host.replay_us < host.cut_us["attention"] < host.op_us["attention"]
    rows = json.loads(figures.read_text())["figures"]["step"]
    assert len(rows) == 9 and all(row["measured us"] > 0 for row in rows)


def test_what_is_off_by_more_than_is_allowed_is_missed() -> None:
    row = {"model": "1B", "tokens": 8, "mode": "FULL", "predicted us": 116.0, "measured us": 100.0}
    rows = [{**row, "off": off} for off in (0.16, 0.14, -0.16, -0.14)]
    on_gpu, on_cpu = (argparse.Namespace(device=device) for device in ("cuda", "cpu"))
    told = launch.missed({"step": rows}, on_gpu)
    assert len(told) == 2 and told[0] == (
        "1B, 8 tokens, FULL: off by 16%: 116 us predicted, 100 measured"
    )
    assert launch.missed({"step": rows}, on_cpu) == []


def test_modes_that_differ_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = beside.make_bench("tiny", 32, [2], "cpu", None)
    found = beside.opened(made, mixes.NOTHING, [2], True, 32)
    monkeypatch.setattr(beside, "timed", lambda *rest: turns.Timed([turns.Round(1, 1, 1)], None))
    yardstick = Steady(1.0)
    rows = [row for row, _ in beside.point(made, found, 2, True, 1, yardstick)]
    assert [row["mode"] for row in rows] == list(beside.MODES)
    assert all(0 <= row["error"] < beside.MOST_OFF for row in rows)
    step = found.steps["FULL"]

    def wrong(cache: Any, batch: Any, allowed: Any) -> Any:
        ids, logits, cache = step(cache, batch, allowed=allowed)
        return ids, logits + (0.3 if "PIECEWISE" in allowed else 0.0), cache

    wrong.backends = step.backends  # type: ignore[attr-defined]
    broken = found._replace(steps=dict.fromkeys(beside.MODES, wrong))
    with pytest.raises(beside.Wrong, match="PIECEWISE, 2 tokens"):
        list(beside.point(made, broken, 2, True, 1, yardstick))


class Steady(mixes.Yardstick):
    """A host that is always as slow."""

    def __init__(self, by: float) -> None:
        self.by = by

    def slower(self) -> float:
        return self.by


HOST = fg.core.HostConstants("h", 1.0, 2.0, 0.0, 3.0, 4.0, {"product": 5.0}, {"attention": 6.0})
FAST = fg.core.DeviceConstants("d", 1e12, {"bfloat16": 1e12, "float32": 1e12}, 0.0)


def test_a_step_is_predicted_with_the_host_as_slow_as_it_is_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = beside.make_bench("tiny", 32, [2], "cpu", None)
    found = beside.opened(made, fg.core.Constants(FAST, HOST), [2], True, 32)

    def rows(*seen: turns.Round) -> list[dict[str, Any]]:
        monkeypatch.setattr(beside, "timed", lambda *rest: turns.Timed(list(seen), None))
        return [row for row, _ in beside.point(made, found, 2, True, 1, Steady(1.0))]

    usual, slow = (
        [row["predicted host us"] for row in rows(turns.Round(1.0, 1.0, by))] for by in (1.0, 1.5)
    )
    assert slow == pytest.approx([1.5 * us for us in usual]) and min(usual) > 0.0
    for us, row in zip(usual, rows(*(turns.Round(by, by, by) for by in (1.0, 3.0, 2.0)))):
        assert row["off, rounds"] == pytest.approx([us - 1] * 3)  # each with its own
    changing = rows(*(turns.Round(wall, 7.0, by) for wall, by in ((2, 3), (2, 1), (2, 2))))
    for us, row in zip(usual, changing):
        assert (row["measured us"], row["host slower"]) == (2, 2)
        assert row["off"] == pytest.approx(us - 1) == row["predicted us"] / 2 - 1


def test_the_host_is_as_slow_as_the_mixes_beside_its_constants(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All of those by which ops were timed, a burst of each in turn."""
    told = mixes.Yardstick("cpu", HOST, 1)
    works = [work for one in mixes.each_kind("cpu", 1) for work in one.works]
    assert len(told.made) == 1 + len(mixes.OPS)
    each = 3.0 * len(told.made) + sum(map(HOST.op, works))
    assert told.told_us == pytest.approx(each)
    seen = []

    def host_us(made: Any, ids: Any) -> list[float]:
        seen.append(made)
        return [each / len(told.made) * by for by in (1.0, 2.0, 9.0)]

    monkeypatch.setattr(mixes.clocks, "host_us", host_us)
    assert told.slower() == pytest.approx(2.0)
    assert seen == told.made


def test_step_and_mix_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round lies between two looks, and is as slow as their mean."""
    seen: list[str] = []

    class Slower(Steady):
        def slower(self) -> float:
            seen.append("mix")
            return float(seen.count("mix"))

    def clock(name: str, value: Any) -> Callable[..., Any]:
        def told(*rest: Any) -> Any:
            seen.append(name)
            return value

        return told

    monkeypatch.setattr(turns.clocks, "wall_ms", clock("wall", 0.004))
    monkeypatch.setattr(turns.clocks, "host_us", clock("host", [1.0, 3.0, 2.0]))
    monkeypatch.setattr(turns.clocks, "burst_of", lambda *rest: (1, 0.0))
    monkeypatch.setattr(turns.clocks, "device_ms", lambda *rest: (0.005, True))
    found = turns.timed(lambda: None, "cpu", 20, 1.0, Slower(0.0))
    assert seen == ["mix", *["wall", "host", "mix"] * turns.ROUNDS]
    assert found.rounds == [turns.Round(4.0, 2.0, i + 1.5) for i in range(turns.ROUNDS)]
    assert found.device == 5.0
    monkeypatch.setattr(turns.clocks, "device_ms", lambda *rest: (0.005, False))
    assert turns.timed(lambda: None, "cpu", 20, 1.0, Slower(0.0)).device is None


@pytest.mark.parametrize(
    "likely_us, steps, rounds",
    [(900.0, 20, 7), (5e3, 5, 7), (1e4, 4, 7), (2.5e4, 8, 3), (4e5, 2, 3)],
)
def test_rounds_are_short_and_as_many_as_there_is_time_for(
    likely_us: float, steps: int, rounds: int
) -> None:
    assert turns.shape_of(20, likely_us) == (steps, rounds)
    assert turns.shape_of(2, likely_us) == (2, rounds)


def test_the_round_in_the_middle_is_by_what_it_is_off() -> None:
    assert turns.in_the_middle([0.5, -0.1, 0.0]) == 2
    assert turns.in_the_middle([0.1]) == 0


def test_a_predicted_step_is_split_by_kind() -> None:
    made = beside.make_bench("tiny", 32, [2], "cpu", None)
    device = fg.core.DeviceConstants("d", 1e6, {"bfloat16": 1e6}, 1.0)
    constants = mixes.NOTHING._replace(device=device)
    model = beside.opened(made, constants, [2], True, 32).model
    spec = fg.BatchSpec(2, 2, query_len=1, host=fg.HostBounds(1, 32))
    told = beside.kinds_of(model, spec)
    assert {"product", "decode attention", "reduction"} <= told.keys()
    total = model.predict(spec, "FULL").device_us
    assert sum(us for _, us in told.values()) == pytest.approx(total, abs=0.1 * len(told))
