"""A capture cannot be silent: what a graph would drop, or would wait for, is named with its line.

The calls are in a backend's `run`, which no trace can see into.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import toys

import fngraph as fg
from fngraph.errors import CaptureError
from fngraph.graphs import witness
from fngraph.graphs.recorder import WAITS, describe
from fngraph.graphs.witness import Witness, check_no_wait
from fngraph.ops import Backend, define

HERE = Path(__file__).name
Run = Callable[[torch.Tensor, torch.Tensor], Any]
RUN: list[Run] = []  # what the primitive's backend does


def _run(args: Any, host: Any) -> None:
    RUN[0](args.x, args.out)


NAUGHTY = define(
    "toy_naughty",
    "(Tensor x, Tensor(a!) out)",
    configure=lambda x, out: x.dtype,
    default=Backend("plain", _run, support=lambda config: fg.Support.ALWAYS),
)


def forward(p: Any, s: Any, b: toys.Batch) -> Any:
    x = p["w"][b.token_ids]
    out = torch.zeros_like(x)
    NAUGHTY.op(x, out)
    return out + 1, s


def compiled(run: Run, device: Any, modes: str) -> tuple[Any, Any, Any]:
    RUN[:] = [run]
    params, state = toys.tally_params(device), toys.tally_state(device)
    fast = fg.graphify(
        forward, modes=modes, donate="s", stage="b", limits=toys.LIMITS, sizes=(1, 2, 4)
    )
    return fast.trace(params, state).split().lower().compile(), params, state


def line_of(run: Run) -> str:
    """Where `# here` is."""
    lines, first = inspect.getsourcelines(run)
    (number,) = [first + i for i, line in enumerate(lines) if "# here" in line]
    return f"{HERE}:{number}"


def refused(run: Run, device: Any, *words: str) -> None:
    """See every capture refused with all of `words`; a good backend is captured afterwards."""
    made, params, state = compiled(run, device, "FULL_DECODE_ONLY")
    with pytest.raises(CaptureError) as caught:
        made.capture(params, state)
    text = str(caught.value)
    assert [w for w in words if w not in text] == [], text
    RUN[:] = [good]
    step = made.capture(params, state)
    batch = toys.on(toys.decode(2), device)
    assert torch.equal(step(state, batch)[0], params["w"][batch.token_ids] * 2 + 1)


def good(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x * 2)


def item(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x * x[0, 0].item())  # here


def branch(x: torch.Tensor, out: torch.Tensor) -> None:
    if x.sum() > 0:  # here
        out.copy_(x)


def nonzero(x: torch.Tensor, out: torch.Tensor) -> None:
    out[x.nonzero()[:, 0]] = 1  # here


def mask(x: torch.Tensor, out: torch.Tensor) -> None:
    out[:1] = x[x > 0].sum()  # here


def equal(x: torch.Tensor, out: torch.Tensor) -> None:
    if torch.equal(x, out):  # here
        out.copy_(x)


@pytest.mark.parametrize("run", [item, branch, nonzero, mask, equal])
def test_a_value_read_on_the_host_is_named(device, run: Run):
    refused(run, device, f"{line_of(run)}: aten", "reads a value back to the host", "torch.where")


@pytest.mark.parametrize("run", [item, nonzero])
def test_between_two_graphs_it_may_read(device, run: Run):
    made, params, state = compiled(run, device, "PIECEWISE")
    step = made.capture(params, state)
    for rows in (2, 3, 4):
        batch = toys.on(toys.batch(rows, seed=rows), device)
        want = torch.zeros(rows, toys.E, device=device)
        run(params["w"][batch.token_ids], want)
        got, state = step(state, batch)
        assert torch.equal(got, want + 1)


def small_only(x: torch.Tensor, out: torch.Tensor) -> None:
    if len(x) == 1:
        x.sum().item()  # here
    out.copy_(x * 2)


def test_a_later_key_names_its_line_too(device):
    """Later keys of a mode are not looked at op by op; torch's own error has a traceback."""
    refused(small_only, device, line_of(small_only))


def raises(x: torch.Tensor, out: torch.Tensor) -> None:
    raise ValueError("out of cheese")  # here


def test_an_exception_is_named_with_its_line(device):
    refused(raises, device, "out of cheese, at ", line_of(raises))


def test_a_library_s_op_is_named_by_the_line_in_forward(device):
    def bad(x: torch.Tensor) -> torch.Tensor:
        return x[x > 0]

    x = torch.ones(3, device=device)
    recorder = fg.graphs.recorders.make_recorder(None, device)
    with pytest.raises(CaptureError, match=rf"{HERE}:\d+: aten.index.Tensor reads a value"):
        recorder.record(lambda: bad(x))


# --- the look itself, without a GPU ---------------------------------------------------------------


def code() -> Any:
    return inspect.currentframe().f_back.f_code  # type: ignore[union-attr]


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The current stream, and whether it is capturing: stand-ins for CUDA's."""
    now = {"stream": 1, "capturing": True}
    monkeypatch.setattr("fngraph.graphs.witness.current_stream", lambda index: now["stream"])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now["capturing"])
    return now


def test_an_op_on_a_stream_that_is_not_captured(streams):
    x = torch.ones(3)
    with Witness(torch.device("cuda", 0), code()) as looked:
        x + 1
        streams.update(stream=2, capturing=False)
        x.view(1, 3)  # does nothing on the device
        with pytest.raises(CaptureError, match=r"aten.mul.Tensor runs on a stream.*wait_stream"):
            x * 2
        with pytest.raises(CaptureError, match=r"aten.empty.memory_format"):
            torch.empty(3)
        with pytest.raises(CaptureError, match=r"aten.zero_"):
            x.zero_()
    assert x.tolist() == [1, 1, 1] and "aten.zero_" in looked.aside


def test_an_op_on_a_forked_stream_is_remembered(streams):
    x = torch.ones(3)
    with Witness(torch.device("cuda", 0), code()) as looked:
        x + 1
        assert looked.aside == ""
        streams.update(stream=2)
        x * 2
        streams.update(stream=1)
        x - 2
    assert looked.aside == "aten.mul.Tensor"  # this function's own lines are outside of a recording


COPIES: dict[str, tuple[Callable[[Any, Any], Any], bool]] = {
    "copy_ from the host": (lambda h, d: d.copy_(h), True),
    "copy_ to the host": (lambda h, d: h.copy_(d), True),
    "unpinned, non_blocking": (lambda h, d: d.copy_(h, non_blocking=True), True),
    "to the device": (lambda h, d: h.to(d.device), True),
    "to the device, non_blocking": (lambda h, d: h.to(d.device, non_blocking=True), True),
    "on the host": (lambda h, d: h.copy_(h + 1), False),
    "on the device": (lambda h, d: d.copy_(d + 1), False),
    "another dtype": (lambda h, d: h.double(), False),
}


@pytest.mark.parametrize("what", COPIES)
def test_copies_between_host_and_device(what: str):
    copy, waits = COPIES[what]
    seen = []

    class Look(witness.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(func)
            check_no_wait(func, args, kwargs or {}, code())
            return func(*args, **(kwargs or {}))

    host, device = torch.ones(3), torch.ones(3, device="meta")
    with Look():
        if waits:
            with pytest.raises(CaptureError, match="copies between host and device"):
                copy(host, device)
        else:
            copy(host, device)
    assert seen


# --- CUDA -----------------------------------------------------------------------------------------


def to_host(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x * len(x.cpu()))  # here


def from_host(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(torch.ones(out.shape))  # here


def unpinned(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(torch.ones(out.shape), non_blocking=True)  # here


@pytest.mark.gpu
@pytest.mark.parametrize("run", [to_host, from_host, unpinned])
def test_a_copy_that_waits_is_named(run: Run):
    refused(run, "cuda", f"{line_of(run)}: aten", "copies between host and device")


def literal(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x * torch.tensor([2.0], device="cuda"))  # here


def synchronize(x: torch.Tensor, out: torch.Tensor) -> None:
    torch.cuda.synchronize()  # here


def waits_for_stream(x: torch.Tensor, out: torch.Tensor) -> None:
    torch.cuda.current_stream().synchronize()  # here


@pytest.mark.gpu
@pytest.mark.parametrize("run", [literal, synchronize, waits_for_stream])
def test_a_wait_that_is_no_op_is_named_by_its_line(run: Run):
    refused(run, "cuda", line_of(run))


def svd(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x * torch.linalg.svdvals(x).sum())  # here


@pytest.mark.gpu
def test_an_op_that_waits_inside_is_named_and_what_to_do():
    refused(svd, "cuda", line_of(svd), "waits for the device in this op, which no graph can hold")


@pytest.mark.parametrize("text", WAITS)
def test_what_to_do_about_an_op_that_waits_is_said(text: str):
    told = describe(RuntimeError(f"CUDA error: {text}\nSearch for it"))
    assert told.startswith(f"CUDA error: {text}. torch waits for the device in this op")
    assert "NONE" in told and "NONE" not in describe(RuntimeError("no kernel image"))


PINNED: list[torch.Tensor] = []


@pytest.mark.gpu
def test_a_copy_from_pinned_memory_that_stays_is_captured():
    PINNED[:] = [torch.full((toys.E,), 3.0).pin_memory()]

    def run(x: torch.Tensor, out: torch.Tensor) -> None:
        row = torch.empty(toys.E, device="cuda")
        row.copy_(PINNED[0], non_blocking=True)
        out.copy_(x * row)

    made, params, state = compiled(run, "cuda", "FULL_DECODE_ONLY")
    step = made.capture(params, state)
    batch = toys.on(toys.decode(2), "cuda")
    for factor in (3.0, 5.0):
        torch.cuda.synchronize()
        PINNED[0].fill_(factor)
        got, state = step(state, batch)
        assert torch.equal(got, params["w"][batch.token_ids] * factor + 1)


SIDE: list[Any] = []


def strays(x: torch.Tensor, out: torch.Tensor) -> None:
    with torch.cuda.stream(SIDE[0]):
        y = x * 2  # here
    out.copy_(y)


def only_allocates(x: torch.Tensor, out: torch.Tensor) -> None:
    with torch.cuda.stream(SIDE[0]):
        y = torch.empty_like(x)  # here
    out.copy_(torch.mul(x, 2, out=y))


@pytest.mark.gpu
@pytest.mark.parametrize("run", [strays, only_allocates])
def test_an_op_outside_of_the_capture_is_named(run: Run):
    SIDE[:] = [torch.cuda.Stream()]
    refused(run, "cuda", f"{line_of(run)}: aten", "not part of the capture", "wait_stream")


def not_joined(x: torch.Tensor, out: torch.Tensor) -> None:
    SIDE[0].wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(SIDE[0]):
        out.copy_(x * 2)  # here


@pytest.mark.gpu
def test_a_stream_that_is_not_joined_is_named():
    SIDE[:] = [torch.cuda.Stream()]
    refused(not_joined, "cuda", "the last op on another stream is", line_of(not_joined))


@pytest.mark.gpu
def test_a_forked_and_joined_stream_is_captured():
    SIDE[:] = [torch.cuda.Stream()]

    def run(x: torch.Tensor, out: torch.Tensor) -> None:
        here = torch.cuda.current_stream()
        SIDE[0].wait_stream(here)
        with torch.cuda.stream(SIDE[0]):
            y = (x * 2).sin()
            y = y * 3
        z = (x * 5).cos()
        here.wait_stream(SIDE[0])
        out.copy_(y + z)

    made, params, state = compiled(run, "cuda", "FULL_DECODE_ONLY")
    step = made.capture(params, state)
    for rows in (1, 2, 4, 3, 1):
        batch = toys.on(toys.decode(rows, seed=rows), "cuda")
        want = torch.empty(rows, toys.E, device="cuda")
        run(params["w"][batch.token_ids], want)
        torch.cuda.synchronize()
        got, state = step(state, batch)
        assert torch.equal(got, want + 1)
