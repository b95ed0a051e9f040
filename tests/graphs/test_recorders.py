"""What a `Recorder` promises: one suite, for the tape and for CUDA.

`kit.recorder` records on `kit.device`. On CUDA, `warm_up` runs a function for real first; on the
tape it does nothing, so a test that counts runs does not call it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fngraph.errors import CaptureError
from fngraph.graphs.recorders import make_recorder
from fngraph.torch_facts.names import tree_leaves

MB = 1 << 20


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """First address of a tensor's storage, and the one past its last."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def overlap(a: tuple[int, int], b: tuple[int, int]) -> bool:
    """Whether two spans share a byte."""
    return a[0] < b[1] and b[0] < a[1]


def on(kit: Any, *values: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of these values on the recorder's device."""
    return torch.tensor(values, dtype=dtype, device=kit.device)


def leaves(tree: Any) -> list[torch.Tensor]:
    """The tensors of an op's result."""
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def replayed(kit: Any, fn: Callable[[], Any]) -> Any:
    """What `fn` gives when it is recorded and then replayed once."""
    recording, out = kit.recorder.record(fn)
    recording.replay()
    return out


# --- recording is not running ---------------------------------------------------------------------


def test_recording_does_not_execute(kit):
    buffer = on(kit, 0.0, 0.0)
    recording, _ = kit.recorder.record(lambda: buffer.add_(1))
    assert buffer.tolist() == [0, 0]  # after recording; a plain call would have made it 1
    recording.replay()
    assert buffer.tolist() == [1, 1]
    recording.replay()
    assert buffer.tolist() == [2, 2]


def test_outputs_hold_no_result_before_the_first_replay(kit):
    x = on(kit, 0.1234, 5.678)
    recording, out = kit.recorder.record(lambda: x * 3.7)
    assert not torch.equal(out, x * 3.7)
    recording.replay()
    assert torch.equal(out, x * 3.7)


def test_each_replay_puts_the_result_into_the_same_memory(kit):
    x = on(kit, 1.0, 2.0)
    recording, out = kit.recorder.record(lambda: x + 1)
    address, owned = out.data_ptr(), []
    for value in (1.0, 7.0):
        x.fill_(value)
        recording.replay()
        owned.append(out.clone())
        assert out.data_ptr() == address and out.tolist() == [value + 1] * 2
    assert owned[0].tolist() == [2, 2]  # `out` itself has been overwritten


def test_what_is_returned_comes_back_as_the_same_object(kit):
    x, made = on(kit, 1.0), {}

    def fn() -> dict[str, Any]:
        made["out"] = {"a": [x + 1], "b": None, "c": "text"}
        return made["out"]

    _, result = kit.recorder.record(fn)
    assert result is made["out"] and result["b"] is None


def test_inputs_are_read_at_replay_from_the_address_that_was_recorded(kit):
    x = on(kit, 1.0)
    recording, out = kit.recorder.record(lambda: x * 10)
    x.copy_(on(kit, 3.0))
    recording.replay()
    assert out.item() == 30
    x = on(kit, 4.0)  # a new tensor under the old name: the graph knows nothing of it
    recording.replay()
    assert out.item() == 30


def test_python_values_and_branches_are_frozen(kit):
    x, config = on(kit, 1.0), {"scale": 2.0, "double": True}

    def fn() -> torch.Tensor:
        y = x * config["scale"]
        return y + y if config["double"] else y

    recording, out = kit.recorder.record(fn)
    config.update(scale=100.0, double=False)
    recording.replay()
    assert out.item() == 4


def test_python_side_effects_happen_once(kit):
    x, calls = on(kit, 1.0), []

    def fn() -> torch.Tensor:
        calls.append("here")
        return x + 1

    recording, _ = kit.recorder.record(fn)
    assert calls == ["here"]
    for _ in range(3):
        recording.replay()
    assert calls == ["here"]


def test_a_literal_inside_is_frozen_with_its_value(kit):
    x = on(kit, 1.0, 2.0)
    recording, out = kit.recorder.record(
        lambda: x + torch.full((2,), 3.0, device=kit.device) + torch.arange(2, device=kit.device)
    )
    recording.replay()
    recording.replay()
    assert out.tolist() == [4, 6]


def test_recordings_replay_in_any_order(kit):
    x, total = on(kit, 2.0), on(kit, 0.0)
    a, doubled = kit.recorder.record(lambda: total.add_(1) * 2)
    b, tripled = kit.recorder.record(lambda: total.add_(x) * 3)
    for recording, out, value in ((a, doubled, 2), (b, tripled, 9), (a, doubled, 8)):
        recording.replay()
        assert out.item() == value
    assert total.item() == 4


def test_one_recording_reads_what_another_wrote(kit):
    x = on(kit, 2.0)
    first, y = kit.recorder.record(lambda: x * x)
    second, z = kit.recorder.record(lambda: y + 1)
    for value in (3.0, 4.0):
        x.fill_(value)
        first.replay()
        second.replay()
        assert z.item() == value**2 + 1


def test_the_graph_is_there_to_look_at(kit):
    x = on(kit, 1.0)
    recording, _ = kit.recorder.record(lambda: x + 1)
    assert recording.graph is not None and recording.graph is recording.graph


# --- what a graph cannot hold ---------------------------------------------------------------------

HOST_READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x[0].item(),
    "float": lambda x: float(x[0]),
    "int": lambda x: int(x[0]),
    "if tensor": lambda x: x.sum() if x[0] > 0 else x,
    "bool": lambda x: bool(x.any()),
    "nonzero": lambda x: x.nonzero(),
    "boolean mask": lambda x: x[x > 0],
    "mask of uint8": lambda x: torch.ops.aten.index.Tensor(x, [(x > 0).to(torch.uint8)]),
    "masked_select": lambda x: torch.masked_select(x, x > 0),
    "where with one argument": lambda x: torch.where(x > 0),
    "unique": lambda x: torch.unique(x),
    "torch.equal": lambda x: torch.equal(x, x + 1),
}


@pytest.mark.parametrize("what", HOST_READS)
def test_a_host_read_is_refused_and_nothing_is_lost(kit, what: str):
    x, state = on(kit, 1.0, 2.0), on(kit, 5.0, 5.0)
    good, out = kit.recorder.record(lambda: state * 2)
    good.replay()
    before = kit.used

    def bad() -> Any:
        state.add_(1)
        y = x.expand(MB, 2) + 1  # 8 MB of the pool, alive when it fails
        return HOST_READS[what](x), y

    with pytest.raises(CaptureError):
        kit.recorder.record(bad)
    assert state.tolist() == [5, 5]
    assert kit.used == before
    good.replay()  # what was recorded before still works
    assert out.tolist() == [10, 10]
    assert replayed(kit, lambda: x + state).tolist() == [6, 7]  # and so does the recorder


def test_an_exception_in_fn_is_a_capture_error_and_nothing_is_lost(kit):
    x, state = on(kit, 1.0), on(kit, 5.0)
    before = kit.used

    def bad() -> None:
        state.add_(1)
        kept.append(x.expand(MB) + 1)
        kept.clear()
        held = x.expand(MB) * 2  # noqa: F841  in a frame that the traceback keeps
        raise ValueError("out of cheese")

    kept: list[torch.Tensor] = []
    with pytest.raises(CaptureError, match="out of cheese") as caught:
        kit.recorder.record(bad)
    assert isinstance(caught.value.__cause__, ValueError)
    assert state.item() == 5 and kit.used == before
    assert replayed(kit, lambda: x + state).item() == 6


@pytest.mark.parametrize("own", [True, False], ids=["itself", "another"])
def test_recordings_do_not_nest(kit, own: bool):
    inner = kit.recorder if own else make_recorder(kit.recorder.name, kit.device)
    x = on(kit, 1.0)
    before = kit.used
    with pytest.raises(CaptureError, match="nest"):
        kit.recorder.record(lambda: inner.record(lambda: x + 1))
    assert kit.used == before
    assert replayed(kit, lambda: x + 1).item() == 2


@pytest.mark.parametrize(
    ("name", "device", "message"),
    [("tapes", "cpu", "tapes.*cuda.*tape"), ("CUDA", "cpu", "CUDA.*cuda.*tape"),
     ("tape", "cuda:0", "tape.*cuda"), ("cuda", "cpu", "cuda.*cpu.*tape")],
)  # fmt: skip
def test_an_unknown_recorder_or_device_is_refused(name: str, device: str, message: str):
    with pytest.raises(CaptureError, match=message):
        make_recorder(name, torch.device(device))


def test_the_recorder_of_a_cpu_is_the_tape():
    assert make_recorder(None, torch.device("cpu")).name == "tape"


# --- memory ---------------------------------------------------------------------------------------


def test_memory_that_dies_in_one_recording_serves_the_next(kit):
    x, dead, taken = torch.ones(MB, device=kit.device), [], []

    def first() -> torch.Tensor:
        temporary = x + 1
        doubled = temporary * 2
        dead.extend([span(temporary), span(doubled)])
        return doubled.sum()

    def second() -> torch.Tensor:
        temporary = x + 2
        taken.append(span(temporary))
        return temporary.sum()

    a, sum_a = kit.recorder.record(first)
    b, sum_b = kit.recorder.record(second)
    assert any(overlap(d, taken[0]) for d in dead)
    for recording, out, value in ((a, sum_a, 4 * MB), (b, sum_b, 3 * MB), (a, sum_a, 4 * MB)):
        recording.replay()
        assert out.item() == value


def test_memory_that_dies_within_a_recording_serves_later_ops_of_it(kit):
    x, before = torch.ones(MB, device=kit.device), kit.used

    def fn() -> torch.Tensor:
        y = x
        for _ in range(20):
            y = y + 1
        return y

    recording, out = kit.recorder.record(fn)
    assert kit.used - before < 3 * 4 * MB  # 20 results of 4 MB each, two of them alive at once
    recording.replay()
    assert out[0].item() == 21


def test_live_memory_is_never_given_to_another_recording(kit):
    x, spans = torch.ones(MB, device=kit.device), []

    def second() -> torch.Tensor:
        first_half, second_half = x * 5, x * 7
        spans.extend([span(first_half), span(second_half)])
        return first_half + second_half

    a, out_a = kit.recorder.record(lambda: x + 1)
    b, out_b = kit.recorder.record(second)
    assert not any(overlap(span(out_a), s) for s in (*spans, span(out_b)))
    for order in ((a, b), (b, a)):
        for recording in order:
            recording.replay()
        assert (out_a[0].item(), out_b[0].item()) == (2, 12)


def test_outputs_of_recordings_that_are_alive_do_not_overlap(kit):
    x = torch.ones(1000, device=kit.device)
    results = [
        kit.recorder.record(lambda i=i: [x[: 10 * i] + j for j in range(3)]) for i in range(1, 8)
    ]
    spans = [span(t) for _, outs in results for t in outs]
    assert not any(overlap(a, b) for i, a in enumerate(spans) for b in spans[:i])
    for recording, _ in results:
        recording.replay()
    assert all(outs[j].eq(1 + j).all() for _, outs in results for j in range(3))


def test_a_result_that_is_dropped_gives_its_memory_back(kit):
    x, before = torch.ones(MB, device=kit.device), kit.used
    recording, out = kit.recorder.record(lambda: x + 1)
    del out, recording
    assert kit.used == before


def test_a_view_keeps_its_memory(kit):
    x = torch.ones(MB, device=kit.device)
    a, out = kit.recorder.record(lambda: (x + 1)[3:5])  # the view is all that is left
    b, other = kit.recorder.record(lambda: x * 9)
    assert not overlap(span(out), span(other))
    a.replay()
    b.replay()
    assert out.tolist() == [2, 2]


def test_unowned_is_the_same_memory_and_does_not_keep_it(kit):
    x, before = torch.ones(MB, device=kit.device), kit.used
    a, out = kit.recorder.record(lambda: (x + 1).view(2, -1))
    alias = kit.recorder.unowned(out)
    assert alias.data_ptr() == out.data_ptr() and alias.dtype == out.dtype
    assert alias.shape == out.shape and alias.stride() == out.stride()
    a.replay()
    assert alias[1, 0].item() == 2
    del out
    assert kit.used == before  # given back, though the alias is still here
    b, reused = kit.recorder.record(lambda: x * 5)
    assert alias.data_ptr() == reused.data_ptr()
    b.replay()
    assert alias[1, 0].item() == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_unowned_sees_views_where_they_are(kit, dtype: torch.dtype):
    x = torch.arange(24, device=kit.device).view(4, 6)
    recording, out = kit.recorder.record(lambda: (x % 2).to(dtype).clone()[1:3, 2:].t())
    alias = kit.recorder.unowned(out)
    recording.replay()
    assert alias.data_ptr() == out.data_ptr() and torch.equal(alias, out)
    assert torch.equal(out, (x % 2).to(dtype)[1:3, 2:].t())


def test_unowned_memory_that_is_not_the_pools_is_the_same_memory(kit):
    x = torch.arange(6.0, device=kit.device).view(2, 3)[:, 1:]
    alias = kit.recorder.unowned(x)
    assert alias.data_ptr() == x.data_ptr() and torch.equal(alias, x)
    assert kit.recorder.unowned(x[:0]).shape == (0, 2)


# --- ops ------------------------------------------------------------------------------------------


def squeezed(x: torch.Tensor, y: torch.Tensor) -> Any:
    """Metadata-only in-place ops, which must not be applied again at each replay."""
    a = (x + y).unsqueeze_(0)
    b = a * 2
    a.squeeze_(0).t_()
    return b, a, a + 1


def turned(x: torch.Tensor, y: torch.Tensor) -> Iterator[Any]:
    """The same on views of new tensors and of inputs, each used before and after."""
    turns = (lambda v: v.t_(), lambda v: v.transpose_(0, 1), lambda v: v.unsqueeze_(1),
             lambda v: v.squeeze_(0), lambda v: v.as_strided_((2,), (2,)))  # fmt: skip
    for turn in turns:
        for v in ((x + y)[:1], x[:1], y[1:2]):
            before = v * 2
            turn(v)
            yield before, v, v + 1


def written_view(x: torch.Tensor, y: torch.Tensor) -> Any:
    """A write through a view of a new tensor, and through a view of an input."""
    z = torch.zeros_like(x)
    z[1:, ::2] = y[1:, ::2]
    x[0].mul_(3)
    return z


def outs(x: torch.Tensor, y: torch.Tensor) -> Any:
    """out= into a new tensor, into a view and into an input."""
    made = torch.empty_like(x)
    torch.add(x, y, out=made)
    torch.mul(x[0], 2, out=y[1])
    return made, torch.sub(x, y, out=torch.empty_like(y))


def foreach_(x: torch.Tensor, y: torch.Tensor) -> Any:
    """Ops on lists that write them."""
    torch._foreach_mul_([x, y[0]], 2.0)
    torch._foreach_add_([x[1], y[0]], [y[1], x[0]])
    torch._foreach_copy_([y[1], y[2]], [x[0], x[1]])


def batch_norm(x: torch.Tensor, y: torch.Tensor) -> Any:
    """An op that mutates its arguments and returns fresh tensors as well."""
    mean, var = x[0].clone(), y[1].abs()
    out = F.batch_norm(x, mean, var, y[0], y[2], training=True)
    return out, mean, var


ZOO: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "pointwise": lambda x, y: torch.where(x > y, x.sigmoid(), (x - y).exp().clamp(max=3)),
    "in place": lambda x, y: x.add_(y).mul_(2).clamp_(min=0),
    "in place on both": lambda x, y: (x.copy_(y), y.zero_(), x.fill_(2)),
    "views": lambda x, y: (x.t(), x[1:, :2], x.reshape(-1), (x + y).view(2, -1).t(),
                           x.expand(2, *x.shape)),
    "reshape that copies": lambda x, y: (x.t().reshape(-1), (x + y).t().contiguous(),
                                         x.t().flatten()),
    "written view": written_view,
    "out=": outs,
    "matmul": lambda x, y: (x @ y.t(), F.linear(x, y), torch.einsum("ab,cb->ac", x, y)),
    "several results": lambda x, y: (*torch.topk(x, 2), *x.sort(dim=1), *torch.var_mean(y, 0),
                                     *x.max(1)),
    "split, chunk, unbind": lambda x, y: (*(x + y).split([1, 3], 1), *x.chunk(2), *y.unbind()),
    "cat and stack": lambda x, y: (torch.cat([x, y]), torch.stack([x, y]), torch.cat([x[:0], y])),
    "norms": lambda x, y: (F.layer_norm(x, x.shape[1:], y[0], y[1]),
                           F.rms_norm(x, x.shape[1:], y[0])),
    "softmax": lambda x, y: (x.softmax(-1), y.log_softmax(0), x.logsumexp(0)),
    "batch norm in training": batch_norm,
    "norms in bfloat16": lambda x, y: (
        F.layer_norm(x.bfloat16(), (4,), y[0].bfloat16()),
        F.layer_norm(x.bfloat16(), (4,), y[0]) if x.device.type == "cpu" else x,
        F.batch_norm(x.bfloat16(), y[0].bfloat16(), y[1].abs().bfloat16()),
        F.instance_norm(x.bfloat16()[None])),
    "masked gradients": lambda x, y: (
        torch.func.grad(lambda w: F.layer_norm(x, (4,), w).pow(3).sum())(y[0]),
        torch.func.grad(lambda w: F.conv1d(x[None], w).pow(2).sum())(y[:, :3, None])),
    "gradients in bfloat16": lambda x, y: (
        torch.ops.aten.silu_backward(x.bfloat16(), y.bfloat16()),
        torch.ops.aten.mish_backward(x.bfloat16(), y.bfloat16()),
        torch.ops.aten.gelu_backward(x.bfloat16(), y.bfloat16())),
    "foreach": lambda x, y: (torch._foreach_add([x, y[0]], [y, x[0]]), torch._foreach_norm([x]),
                             torch._foreach_sqrt([x[0]])),  # new lists, of one result and several
    "foreach in place": foreach_,
    "squeeze_ and t_": squeezed,
    "views that are turned": lambda x, y: list(turned(x, y)),
    "zero-size": lambda x, y: (x[:0] + 1, torch.cat([x[:0] @ y.t(), x @ y.t()]), x[:, :0].sum(1)),
    "scalars": lambda x, y: (x.sum(), x.mean() * y.max(), (x.norm() + 1).sqrt()),
    "bfloat16": lambda x, y: (x.bfloat16() @ y.bfloat16().t(), x.to(torch.bfloat16) + 1),
    "int64 and bool": lambda x, y: ((x * 10).long() // 3, x > y, (x > 0) & (y > 0),
                                    (x > y).long().cumsum(0)),
    "gather and scatter": lambda x, y: (x.gather(1, (y > 0).long()),
                                        torch.zeros_like(x).scatter_(1, (x > 0).long(), 5.0)),
    "index_select and embedding": lambda x, y: (x.index_select(0, (y[:, 0] > 0).long()),
                                                F.embedding((y > 0).long(), x)),
    "integer index": lambda x, y: (x[(y[:, 0] > 0).long()], x[:, (y[0] > 0).long()]),
    "integer index put": lambda x, y: (
        x.index_put_(((y[:, 0] > 0).long().cumsum(0) - 1,), y * 0 + 4),
        x.index_add(0, (y[:, 1] > 9).long(), y)),
    "searchsorted and arange": lambda x, y: torch.searchsorted(
        x[0].sort().values.contiguous(), torch.arange(5.0, device=x.device)),
    "masked_fill and tril": lambda x, y: (x.masked_fill(y > 0, float("-inf")), x.tril(), y.triu_()),
    "argmax and argsort": lambda x, y: (x.argmax(), y.argmax(1), x.argsort(0)),
    "attention": lambda x, y: F.scaled_dot_product_attention(*(t[None, None] for t in (x, y, y))),
    "silu and gelu": lambda x, y: (F.silu(x), F.gelu(y), F.relu(x), x.tanh_()),
    "cumsum and prod": lambda x, y: (x.cumsum(0), y.cumprod(1), x.prod(1), (x > 0).any(1)),
    "clone, detach, empty_like": lambda x, y: (x.clone(), y.detach(), torch.empty_like(x).copy_(y)),
    "new_zeros, ones_like, full": lambda x, y: (
        x.new_zeros(3) + y[0, 0], torch.ones_like(x) + y, torch.full_like(y, 2.5),
        torch.eye(2, device=x.device)),
    "pad, roll, flip, repeat": lambda x, y: (F.pad(x, (1, 0)), x.roll(1, 0), y.flip(1),
                                             x.repeat(2, 1)),
    "conv": lambda x, y: F.conv1d(
        x[None], y[:, :3, None].transpose(0, 1).contiguous()[:, :1].expand(3, 3, 1)),
    "addmm and baddbmm": lambda x, y: (torch.addmm(x[:, :3], x, y.t()),
                                       torch.bmm(x[None], y.t()[None])),
    "nested tuple results": lambda x, y: {"a": (x + 1, [y + 2]), "b": {"c": x @ y.t()}},
}  # fmt: skip


def run_both(kit: Any, fn: Callable[..., Any], *fresh: torch.Tensor) -> None:
    """Record over other contents, replay on `fresh` twice, compare results and inputs."""
    statics = [torch.zeros_like(x, device=kit.device) for x in fresh]
    eager = [x.to(kit.device, copy=True) for x in fresh]
    with torch.no_grad():
        want = fn(*eager)
    kit.recorder.warm_up(lambda: fn(*[x.clone() for x in statics]))
    recording, got = kit.recorder.record(lambda: fn(*statics))
    assert all(x.eq(0).all() for x in statics)
    for _ in range(2):
        for static, x in zip(statics, fresh):
            static.copy_(x)
        recording.replay()
        exact = {"atol": 0, "rtol": 0} if kit.recorder.name == "tape" else {}
        for a, b in zip([*leaves(got), *statics], [*leaves(want), *eager], strict=True):
            torch.testing.assert_close(a, b, equal_nan=True, **exact)


@pytest.mark.parametrize("what", ZOO)
def test_a_replay_equals_eager(kit, what: str):
    generator = torch.Generator().manual_seed(0)
    run_both(kit, ZOO[what], *torch.randn(2, 3, 4, generator=generator))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_every_dtype_goes_through(kit, dtype: torch.dtype):
    x = torch.arange(12).view(3, 4)

    def fn(x: torch.Tensor, y: torch.Tensor) -> Any:
        made = torch.cat([x, y]).flip(0)
        x[1:].copy_(y[1:])
        return made, made.t().contiguous(), torch.where(x == y, x, y), x[:0], made.to(torch.float32)

    run_both(kit, fn, (x % 3).to(dtype), (x % 2).to(dtype))


@pytest.mark.parametrize("shape", [(), (0,), (1,), (0, 4), (5, 0), (2, 1, 3)])
def test_every_shape_goes_through(kit, shape: tuple[int, ...]):
    run_both(
        kit, lambda x: (x + 1, x.reshape(-1) * 2, x.sum(), x.clone().fill_(3)), torch.rand(shape)
    )


def test_a_strided_result_keeps_its_strides(kit):
    x = torch.rand(3, 4, device=kit.device)
    fn = lambda: (x.t() + 1, x.expand(2, 3, 4).transpose(0, 2) * 2)  # noqa: E731
    for a, b in zip(replayed(kit, fn), fn(), strict=True):
        assert a.stride() == b.stride() and torch.equal(a, b)


def test_a_returned_input_is_the_input(kit):
    x = on(kit, 1.0, 2.0)
    _, (same, view) = kit.recorder.record(lambda: (x, x[1:]))
    assert same is x and view.data_ptr() == x[1:].data_ptr()


# --- grad mode, inference mode, autocast ----------------------------------------------------------

AMBIENT: dict[str, Callable[[], Any]] = {
    name: getattr(torch, name) for name in ("no_grad", "inference_mode", "enable_grad")
}


@pytest.mark.parametrize("ambient", [*AMBIENT, "autocast"])
def test_a_replay_works_under(kit, ambient: str):
    w = torch.nn.Parameter(on(kit, 2.0, 3.0))
    state = on(kit, 0.0, 0.0)
    with torch.no_grad():
        kit.recorder.warm_up(lambda: w[None] @ w[:, None])  # cuBLAS starts outside of a capture
        recording, out = kit.recorder.record(lambda: (state.add_(1) * w, w[None] @ w[:, None]))
    with AMBIENT[ambient]() if ambient in AMBIENT else torch.autocast(kit.device.type):
        recording.replay()
        recording.replay()
    assert state.tolist() == [2, 2] and [x.tolist() for x in out] == [[4, 6], [[13]]]
    assert not any(x.is_inference() for x in (state, *out))


@pytest.mark.parametrize("ambient", AMBIENT)
@pytest.mark.parametrize(
    "what", ["matmul", "reshape that copies", "views", "norms", "in place", "bfloat16"]
)
def test_a_recording_can_be_made_under(kit, ambient: str, what: str):
    with AMBIENT[ambient]():
        run_both(kit, ZOO[what], *torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1)))


def test_inputs_made_in_inference_mode_may_be_read(kit):
    with torch.inference_mode():
        x = on(kit, 1.0, 2.0)
    with torch.no_grad():
        recording, out = kit.recorder.record(lambda: (x + 1, x.view(1, 2) * 2))
    recording.replay()
    assert out[0].tolist() == [2, 3] and out[1].tolist() == [[2, 4]]
