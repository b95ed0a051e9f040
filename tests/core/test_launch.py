"""`fngraph.core.costs.launch` and `fngraph.core.costs.roofline`: limits, laws."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re

import pytest
from hypothesis import given, settings, strategies as st

from fngraph import core
from fngraph.core import (
    BatchSpec,
    Constants,
    Curve,
    DeviceConstants,
    Grid,
    HostConstants,
    LaunchModel,
    Mode,
    Part,
    Work,
    crossing,
    predict,
)
from fngraph.core.costs.roofline import BOUNDS
from fngraph.errors import ModesError, SpecError

DEVICE = DeviceConstants(
    "a device", 4e6, {"bfloat16": 8e8, "float32": 5e7}, kernel_us=1.0, gap_us=0.5, boundary_us=3.0,
    step_us=9.0, curves={"reduction": Curve((1e3, 1e6), (2.0, 4.0))},
    products={"bfloat16": Grid((1, 100), (10, 1000), (10, 1000), tuple(map(float, range(3, 11))))},
)  # fmt: skip
HOST = HostConstants(
    "a host", step_us=20.0, replay_us=2.0, node_us=0.01, eager_step_us=50.0, other_us=5.0,
    op_us={"view": 1.0, "attention": 100.0}, cut_us={"attention": 30.0},
)  # fmt: skip
MACHINE = Constants(DEVICE, HOST, "made up")
VIEW = Work("view", kernels=0)
SMALL, WIDE = Work("pointwise", 4e3), Work("pointwise", 4e9)
DEEP = Work("other", 1e3, 8e12)
ATTENTION = Work("decode attention", 4e6, called="attention")
RUNTIME = (Mode.NONE, Mode.PIECEWISE, Mode.FULL)

works = st.builds(
    Work, st.sampled_from(["pointwise", "reduction", "product"]), st.floats(0, 1e9),
    st.floats(0, 1e12), st.integers(0, 3), st.sampled_from(["bfloat16", "float32"]),
)  # fmt: skip
parts = st.lists(
    st.one_of(
        st.builds(Part, st.lists(works, max_size=4).map(tuple)),
        st.builds(lambda work: Part((work,), True), works),
    ),
    max_size=5,
)
times = st.floats(0, 100)
machines = st.builds(
    lambda kernel, gap, boundary, step, *host: Constants(
        dataclasses.replace(
            DEVICE, kernel_us=kernel, gap_us=gap, boundary_us=boundary, step_us=step
        ),
        HostConstants("h", *host),
    ),
    *[times] * 9,
)


# --- the two limits -------------------------------------------------------------------------------


def test_without_ops_a_step_takes_what_the_step_takes():
    assert predict((), MACHINE, "NONE")[1:4] == (50.0, 0.0, 50.0)
    assert predict((), MACHINE, "FULL")[1:4] == (22.0, 9.0, 22.0)
    assert predict((), MACHINE, "PIECEWISE") == predict((), MACHINE, "FULL")._replace(
        mode=Mode.PIECEWISE
    )


def test_of_one_op_that_launches_nothing_only_the_host_knows():
    part = Part((VIEW,))
    assert predict([part], MACHINE, "NONE")[1:3] == (51.0, 0.0)
    assert predict([part], MACHINE, "FULL") == predict((), MACHINE, "FULL")


def test_one_op_takes_what_it_takes():
    part = Part((WIDE,))
    none, piecewise, full = (predict([part], MACHINE, mode) for mode in RUNTIME)
    assert (none.host_us, none.device_us, none.bound) == (55.0, 1000.5, "memory")
    assert (full.host_us, full.device_us, full.wall_us) == (pytest.approx(22.01), 1009.0, 1009.0)
    assert piecewise == full._replace(mode=Mode.PIECEWISE)
    assert predict([Part((DEEP,))], MACHINE, "FULL").device_us == 10009.0
    assert predict([Part((DEEP,))], MACHINE, "FULL").bound == "compute"


def test_many_small_ops_are_bound_by_launches_and_graphs_bring_what_calls_cost():
    part = Part((SMALL,) * 100)
    none, _, full = (predict([part], MACHINE, mode) for mode in RUNTIME)
    assert (none.wall_us, none.device_us, none.bound) == (550.0, 150.0, "launch")
    assert (full.wall_us, full.bound) == (109.0, "launch")
    assert full.gain(none) == pytest.approx(550 / 109 - 1)
    moved = Part((Work("pointwise", 8e6),) * 9)  # the host is slower, whatever the device does
    assert predict([moved], MACHINE, "NONE").bound == "launch"
    assert predict([moved], MACHINE, "FULL").bound == "memory"


def test_a_cut_is_a_call_between_two_replays():
    run = Part((SMALL,) * 10)
    found = predict([run, Part((ATTENTION,), True), run], MACHINE, "PIECEWISE")
    assert found.launches == 3
    assert found.host_us == pytest.approx(20 + 2 * 2.1 + 30)
    assert found.device_us == pytest.approx(9 + 21 + 2 * 3)
    at_ends = predict(
        [Part((ATTENTION,), True), run, Part((ATTENTION,), True)], MACHINE, "PIECEWISE"
    )
    assert at_ends.launches == 5  # the batch comes in and results go out by graphs
    assert predict([run, run], MACHINE, "PIECEWISE").launches == 1


# --- laws -----------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@settings(max_examples=60, deadline=None)
@given(parts, machines)
def test_laws_of_a_step(parts: list[Part], machine: Constants):
    none, piecewise, full = (predict(parts, machine, mode) for mode in RUNTIME)
    for one in (none, piecewise, full):
        assert one.wall_us == max(one.host_us, one.device_us)
        assert one.device_us == pytest.approx(sum(one.parts_us)) and one.bound in BOUNDS
    assert full.launches == 1 <= piecewise.launches
    assert full.device_us <= piecewise.device_us + 1e-6
    kernels = sum(work.kernels for part in parts for work in part.works)
    apart = none.device_us - machine.device.gap_us * kernels
    assert apart + machine.device.step_us == pytest.approx(full.device_us)


@pytest.mark.sampled(1)
@settings(max_examples=60, deadline=None)
@given(parts, machines, works)
def test_more_work_takes_no_less(parts: list[Part], machine: Constants, work: Work):
    for mode in RUNTIME:
        before, after = (
            predict(x, machine, mode) for x in (parts, [*parts, Part((work,))])
        )  # fmt: skip
        assert all(a <= b + 1e-6 for a, b in zip(before[1:4], after[1:4]))
    cut = predict([*parts, Part((work,), True)], machine, "PIECEWISE")
    run = predict([*parts, Part((work,))], machine, "PIECEWISE")
    assert cut.device_us >= run.device_us - 1e-6


def test_a_step_runs_as_a_runtime_mode():
    with pytest.raises(ModesError, match="FULL_AND_PIECEWISE"):
        predict((), MACHINE, "FULL_AND_PIECEWISE")


# --- one op ---------------------------------------------------------------------------------------


@given(st.floats(0, 2e6))
@settings(max_examples=40, deadline=None)
def test_a_curve_goes_through_its_points_and_on(size: float):
    curve = Curve((1e3, 1e4, 1e6), (2.0, 3.0, 80.0))
    assert [curve(x) for x in (0, *curve.sizes, 2e6)] == [2.0, 2.0, 3.0, 80.0, 160.0]
    assert curve(size) <= curve(size + 1e3)


@given(*[st.integers(1, 5000)] * 3)
@settings(max_examples=40, deadline=None)
def test_a_grid_is_right_between_its_points_of_launch_weights_and_flops(m: int, n: int, k: int):
    def law(m: int, n: int, k: int) -> float:
        return 2 + n * k * 1e-4 + m * n * k * 1e-6

    axes = (1, 16, 700, 5000), (1, 300, 5000), (1, 5000)
    grid = Grid(*axes, tuple(law(*point) for point in itertools.product(*axes)))
    assert grid(m, n, k) == pytest.approx(law(m, n, k))
    assert grid(10000, n, k) == pytest.approx(2 * grid(5000, n, k))


def test_what_was_measured_goes_before_the_roofline():
    assert DEVICE.time(Work("reduction", 1e3))[0] == 2.0
    assert DEVICE.time(Work("pointwise", 4e9))[0] == 1000.0
    at_corner = Work("product", 1e3, 1e3, shape=(1, 10, 10))
    assert DEVICE.time(at_corner)[0] == 3.0
    assert DEVICE.time(at_corner._replace(dtype="float32")) == (1.0, "launch")
    assert DEVICE.time(Work("other", 0, 5e9, dtype="float32")) == (100.0, "compute")
    assert DEVICE.time(Work("other", 0, 5e9, dtype="int8"))[0] == 100.0  # as the slowest
    assert DEVICE.time(VIEW) == (0.0, "launch")
    assert DEVICE.time(Work("reduction", 1e3, 8e10)) == (100.0, "compute")
    by_flops = dataclasses.replace(DEVICE, curves={"sdpa": Curve((1e3, 1e6), (2.0, 4.0), "flops")})
    assert by_flops.time(Work("sdpa", 4e3, 1e3))[0] == 2.0
    assert by_flops.time(Work("sdpa", 4e8, 1e3)) == (100.0, "memory")
    mixed = dataclasses.replace(DEVICE, switch_us=0.25)
    for work in (Work("reduction", 1e3), at_corner, Work("pointwise", 4e9, kernels=3), VIEW):
        assert mixed.time(work)[0] == DEVICE.time(work)[0] + 0.25 * work.kernels


def test_no_product_takes_less_than_its_kernels():
    fast = Grid((1, 100), (10, 1000), (10, 1000), (0.25,) * 8)
    device = dataclasses.replace(DEVICE, products={"bfloat16": fast})
    assert device.time(Work("product", shape=(1, 10, 10), kernels=2)) == (2.0, "launch")


def test_a_step_of_no_time_brings_nothing():
    nothing = predict((), Constants(DEVICE, HOST), "NONE")._replace(wall_us=0.0)
    assert nothing.gain(nothing) == 0.0


def test_of_kinds_that_end_in_a_number_the_nearest_is_taken():
    curves = {f"prefill attention {n}": Curve((1.0,), (float(n),), "flops") for n in (64, 128)}
    device = dataclasses.replace(DEVICE, curves=curves)
    found = [device.time(Work(f"prefill attention {n}", 0, 1.0))[0] for n in (32, 80, 256)]
    assert found == [64.0, 64.0, 128.0]
    assert device.time(Work("prefill mla 64", 0, 8e8)) == (1.0, "launch")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Curve((), ()),
        lambda: Curve((2.0, 1.0), (1.0, 1.0)),
        lambda: Curve((1.0,), (1.0, 2.0)),
        lambda: Curve((1.0,), (0.0,)),
        lambda: Curve((1.0,), (1.0,), "bytes"),
        lambda: Curve((1.0, math.nan), (1.0, 2.0)),
        lambda: Curve((1.0, math.inf), (1.0, 2.0)),
        lambda: Grid((1,), (2, 1), (1,), (1.0, 1.0)),
        lambda: Grid((1, 2), (1,), (1,), (1.0,)),
    ],
)
def test_what_is_no_curve_is_refused(make):
    with pytest.raises(SpecError):
        make()


@pytest.mark.parametrize(
    ("made", "changes"),
    [
        (DEVICE, {"bytes_per_us": 0.0}),
        (DEVICE, {"bytes_per_us": None}),
        (DEVICE, {"flops_per_us": {"float32": 0.0}}),
        (DEVICE, {"flops_per_us": [1.0]}),
        (DEVICE, {"kernel_us": -1.0}),
        (DEVICE, {"kernel_us": "1"}),
        (HOST, {"step_us": math.nan}),
        (HOST, {"op_us": {"view": math.inf}}),
        (HOST, {"other_us": True}),
    ],
)
def test_constants_that_are_no_measurements_are_refused(made, changes):
    """They had been taken, and predicted nothing, or divided by 0."""
    (name,) = changes
    with pytest.raises(SpecError, match=rf"{type(made).__name__}\({name}=.* is no number"):
        dataclasses.replace(made, **changes)


@pytest.mark.parametrize("constants", ["constants.json", {"device": 1}, DEVICE])
def test_a_model_of_what_is_no_constants_is_refused_with_the_way_to_read_them(constants):
    with pytest.raises(TypeError, match=r"fg\.core\.Constants\.loads\(Path"):
        dataclasses.replace(model(), constants=constants)


@pytest.mark.parametrize("context", [0, -5, "512", True, 1.5])
def test_a_context_is_a_number_of_tokens(context):
    with pytest.raises(TypeError, match="a number of tokens, 1 or more"):
        dataclasses.replace(model(), context=context)


def test_constants_come_back_as_they_were_written():
    assert Constants.loads(MACHINE.dumps()) == MACHINE
    for text, why in {
        "": "it is empty", "{}": "it lacks 'device'", "[]": "it is JSON of a list",
        "no": "it is no JSON (", '{"device": {}}': "it lacks 'host'",
        MACHINE.dumps().replace("kernel_us", "kernel"): "a part of it cannot be read (TypeError: ",
    }.items():  # fmt: skip
        said = rf"these are no constants: {re.escape(why)}[^$]*python -m benchmarks launch"
        with pytest.raises(SpecError, match=said):
            Constants.loads(text)


# --- of a model -----------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.integers(1, 3000), st.floats(0.01, 1))
def test_the_crossing_is_where_the_gain_falls(most: int, knee: int, share: float):
    gain = lambda size: share * knee / size  # noqa: E731
    brute = next((n for n in range(1, most + 1) if gain(n) <= share), None)
    assert crossing(gain, most, share) == brute


def model(context: int | None = None) -> LaunchModel:
    """A layer whose work grows with tokens, and attention."""

    def count(pieces, cuts, longest):
        T, R = pieces["T"], cuts["R"]
        run = Part((Work("pointwise", 4e5 * T),) * 20)
        if longest is None:
            raise SpecError("how long?")
        return run, Part((ATTENTION._replace(nbytes=1e5 * longest * R),), True), run

    limits = core.Limits(512, 64)
    resolved = core.resolve("FULL_AND_PIECEWISE", limits=limits, sizes=(1, 8, 64, 512))
    return LaunchModel(count, core.build_table(resolved, limits), MACHINE, (), context)


def test_a_batch_is_predicted_as_it_is_dispatched_and_padded():
    made = model(512)
    found = made.predict(BatchSpec(5, 5, query_len=1))
    assert found == made.predict(BatchSpec(5, 5, query_len=1), "FULL")
    padded = made.predict(BatchSpec(512, 5), "PIECEWISE")
    assert made.predict(BatchSpec(300, 5)) == padded and padded.mode is Mode.PIECEWISE
    assert made.predict(BatchSpec(300, 5), padded=False).device_us < padded.device_us
    assert made.predict(BatchSpec(300, 5), "NONE").device_us < padded.device_us
    assert made.predict(BatchSpec(5, 1), "FULL").mode is Mode.FULL  # though there is no such key


def test_how_long_requests_are_is_said_or_asked():
    said = BatchSpec(8, 8, query_len=1, host=core.HostBounds(max_seq_len=100_000))
    with pytest.raises(SpecError, match="how long"):
        model().predict(said._replace(host=core.HostBounds()))
    assert model().predict(said) == model(100_000).predict(said._replace(host=core.HostBounds()))
    assert model(100_000).predict(said).device_us > model(10).predict(BatchSpec(8, 8)).device_us
    chunk = BatchSpec(300, 1)  # a request has what it brings
    told = chunk._replace(host=core.HostBounds(max_seq_len=300))
    assert model(4).predict(chunk) == model(4).predict(told) == model().predict(told)
    with pytest.raises(SpecError, match="beyond"):
        model(1).predict(BatchSpec(513, 1))


def test_the_ceiling_is_the_last_size_that_pays():
    made = model(512)
    at = made.crossing(0.2)
    assert at is not None and made.gain(at) <= 0.2 < made.gain(at - 1)
    assert made.ceiling(0.2) == at - 1
    limits = made.table.limits
    assert max(core.default_sizes(limits, ceiling=made.ceiling(0.2))) <= at - 1
    assert made.crossing(0.0) is None and made.ceiling(0.0) == 512
    assert made.ceiling(1e9) == 0


def test_costs_are_what_the_planner_and_the_table_take():
    made = model(512)
    steps = {1: 50, 7: 20, 60: 3, 300: 1}
    planned = core.plan_sizes(steps, 2, made.cost())
    every = itertools.combinations(steps, 2)
    best = min(core.planned_cost(steps, sizes, made.cost()) for sizes in every if 300 in sizes)
    assert core.planned_cost(steps, planned, made.cost()) == best
    for mode, key in made.table:
        reqs = min(key.num_reqs or key.num_tokens, 64)
        full = BatchSpec(key.num_tokens, reqs, key.query_len)
        assert made.key_cost(key) == made.predict(full, mode).wall_us


def test_one_more_split_costs_a_replay_a_call_and_two_boundaries():
    found = model(512).split_cost(BatchSpec(1, 1, query_len=1))
    assert found.host_us == pytest.approx(2.0 + 30.0) and found.device_us == pytest.approx(6.0)
    assert found.launches == 2


def test_its_text_has_a_line_a_size_and_where_graphs_stop_paying():
    text = model(512).as_text((1, 512))
    _, _, one, many, *told = text.split("\n")
    assert [line.split("|")[1].strip() for line in (one, many)] == ["1", "512"]
    assert f"from {model(512).crossing()} tokens on FULL brings no more than 5%" in told
    assert "constants: made up" in told
