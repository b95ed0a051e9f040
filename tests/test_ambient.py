"""Ambient state of torch: a change of it is traced again, or an error by choice; never stale."""

from __future__ import annotations

import functools
import gc
import re
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch
import toys
from ambient_cases import CASES
from ambient_forwards import LEFT_CHANGED, matmul, rowwise
from ambient_states import Negates, autocast, dtype, none, setting
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

import fngraph as fg
from fngraph import tracing
from fngraph.errors import AmbientError
from fngraph.fx.tracing.ambient import is_plain, plain_state, read
from fngraph.step.step import MOST_AMBIENTS
from fngraph.torch_facts.names import SWITCHES, get_precision, set_precision

MODES = ("NONE", "PIECEWISE", "FULL")
DISPATCH = {name for name, *_ in CASES if "dispatch mode" in name}
NAMES = [name for name, *_ in CASES if name not in DISPATCH]
BY_NAME = {name: case for name, *case in CASES}


def graphified(fn: Any, modes: str = "FULL", **options: Any) -> Any:
    """`fn` over the toys, its state donated."""
    return fg.graphify(
        fn, modes=modes, donate=1, stage=2, limits=toys.LIMITS, sizes=(8, 16), recorder="tape",
        allow_copies=True, **options,
    )  # fmt: skip


def captured(fn: Any, **options: Any) -> Any:
    """Its step, with the toys bound."""
    p, s = toys.tally_params(), toys.tally_state()
    lowered = graphified(fn, **options).trace(p, s, batch=toys.batch(3, 2)).split().lower()
    return lowered.compile().capture(p, s, lazy=True), s


def same(got: Any, want: Any) -> None:
    """Equal on devices that have values."""
    for a, b in zip(toys.leaves(got), toys.leaves(want)):
        if not b.is_meta:
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.sampled(25)
@pytest.mark.parametrize("modes, outputs", [*((m, "own") for m in MODES), ("FULL", "borrow")])
@pytest.mark.parametrize("name", NAMES)
def test_under_each_state_it_equals_bare_forward(name: str, modes: str, outputs: str) -> None:
    """The first state, another one, and the first again, of one graphified function. A borrowed
    FULL step is replayed under the state itself."""
    fn, first, later, _ = BY_NAME[name]
    fast = graphified(fn, modes, outputs=outputs)
    p, state = toys.tally_params(), toys.tally_state()
    batch = toys.batch(3, 2)
    for context in (first, later, first):
        old = toys.clone(state)
        with context():
            want, after = fn(p, old, batch)
            got, _ = fast(p, state, batch)
        same(got, want)
        same(state, after)


def programs(step: Any) -> int:
    """How many a step has captured keys of."""
    return len({id(keys) for keys in step.by_ambient.values()})


@pytest.mark.parametrize("name", [name for name in NAMES if BY_NAME[name][-1]])
def test_a_change_that_changes_nothing_shares_the_step(name: str) -> None:
    """Nothing is traced or captured again."""
    fn, first, later, _ = BY_NAME[name]
    with first():
        step, state = captured(fn)
        step(state, toys.batch(3, 2))
    keys = len(step)
    with later():
        step(state, toys.batch(3, 2))
    assert len(step) == keys and step.stats.steps == 2 and programs(step) == 1


def test_grad_no_grad_and_inference_mode_are_one_step() -> None:
    """They change what a tensor can be used for later, not what it is."""
    step, state = captured(rowwise)
    for context in (torch.no_grad, torch.enable_grad, torch.inference_mode):
        with context():
            step(state, toys.batch(3, 2))
    assert len(step) == 1 == programs(step)


def reads_grad(p: Any, s: Any, b: Any) -> Any:
    return p["w"][b.token_ids] * (2 if torch.is_grad_enabled() else 3), s


def reads_inference(p: Any, s: Any, b: Any) -> Any:
    return p["w"][b.token_ids] * (2 if torch.is_inference_mode_enabled() else 3), s


@pytest.mark.parametrize("fn", [reads_grad, reads_inference])
@pytest.mark.parametrize("modes", ["FULL", "PIECEWISE", "NONE"])
def test_a_forward_that_asks_for_them_is_traced_for_each(fn: Any, modes: str) -> None:
    step, state = captured(fn, modes=modes)
    batch = toys.batch(3, 2)
    for context in (torch.no_grad, torch.enable_grad, torch.inference_mode, torch.no_grad):
        with context():
            want, _ = fn(toys.tally_params(), state, batch)
            got, _ = step(state, batch)
            assert torch.equal(got, want)


def test_a_trace_leaves_the_state_as_it_was() -> None:
    before = read("cpu")
    step, _ = captured(rowwise)
    assert read("cpu") == before and programs(step) == 1


def test_what_nobody_asks_for_is_not_traced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second trace of a large model takes seconds, in the middle of serving."""
    step, state = captured(rowwise)
    monkeypatch.setattr(tracing, "trace_function", None)
    with torch.inference_mode():
        step(state, toys.batch(3, 2))
    assert torch.is_grad_enabled is torch._C.is_grad_enabled  # torch's own is back


def test_each_state_that_matters_is_captured_once() -> None:
    """Going back and forth costs nothing further."""
    step, state = captured(matmul)
    for _ in range(3):
        step(state, toys.batch(3, 2))
        with autocast()():
            step(state, toys.batch(3, 2))
    assert len(step) == 1 and programs(step) == 2 and step.stats.steps == 6
    assert sum(took.times for took in step.stats.captures.values()) == 2


@pytest.mark.parametrize(
    "name, says",
    [
        ("not, then autocast", "autocast: None, now torch.bfloat16"),
        ("bfloat16, then float16", "autocast: torch.bfloat16, now torch.float16"),
        ("default dtype, zeros", "default_dtype: torch.float32, now torch.float64"),
        ("matmul precision", "float32 matmul precision: ieee, now tf32"),
        ("determinism, read", "deterministic_algorithms: False, now True"),
        ("grad mode, read", "grad: False, now True"),
    ],
)
def test_an_error_by_choice_says_what_has_changed(name: str, says: str) -> None:
    """With the old value and the new one; what has been captured goes on."""
    fn, first, later, _ = BY_NAME[name]

    def counts(p: Any, s: Any, b: Any) -> Any:
        out, s = fn(p, s, b)
        return out, {**s, "seen": s["seen"] + 1}

    fast, p, state = graphified(counts, on_ambient="error"), toys.tally_params(), toys.tally_state()
    with first():
        fast(p, state, toys.batch(3, 2))
    before = toys.clone(state)
    with later(), pytest.raises(AmbientError, match=f"{says}.*on_ambient=.recapture."):
        fast(p, state, toys.batch(3, 2))
    toys.assert_trees(state, before)
    with first():
        fast(p, state, toys.batch(3, 2))
    assert state["seen"].equal(before["seen"] + 1)


@pytest.mark.parametrize("name", [name for name in NAMES if BY_NAME[name][-1]])
def test_an_error_by_choice_lets_pass_what_changes_nothing(name: str) -> None:
    """As where it would be traced again."""
    fn, first, later, _ = BY_NAME[name]
    fast, p, state = graphified(fn, on_ambient="error"), toys.tally_params(), toys.tally_state()
    for context in (first, later):
        with context():
            fast(p, state, toys.batch(3, 2))


@pytest.mark.parametrize("name", sorted(DISPATCH))
def test_dispatch_modes_are_refused(name: str) -> None:
    """A replay goes past them, whether they were there at the capture or not."""
    fn, *_ = BY_NAME[name]
    fast, p, state = graphified(fn), toys.tally_params(), toys.tally_state()
    for context in (Negates, none, Negates):
        with context():
            if context is none:
                fast(p, state, toys.batch(3, 2))
                continue
            with pytest.raises(AmbientError, match="Negates is active"):
                fast(p, state, toys.batch(3, 2))


@pytest.mark.parametrize("fn", LEFT_CHANGED, ids=lambda fn: fn.__name__)
def test_state_that_forward_leaves_changed_is_refused_and_put_back(fn: Any) -> None:
    """A graph would not do it again."""
    torch.manual_seed(12)
    before, seed = read("cpu"), torch.initial_seed()
    precision = torch.get_float32_matmul_precision()
    said = "forward (changes state outside of it|sets .* for a part of itself)"
    with pytest.raises(AmbientError, match=said):
        graphified(fn)(toys.tally_params(), toys.tally_state(), toys.batch(3, 2))
    assert read("cpu") == before and torch.get_float32_matmul_precision() == precision
    assert fn.__name__ == "sets_seed" or torch.initial_seed() == seed


@pytest.mark.parametrize(("device", "backend"), [("cpu", "mkldnn"), ("cuda", "cuda")])
def test_matmul_precision_is_that_of_the_functions_own_device(device: str, backend: str) -> None:
    """Torch has a switch for each backend; the other's does not matter to the quick look."""
    other = {"mkldnn": "cuda", "cuda": "mkldnn"}[backend]
    look = plain_state(device)
    before, all_before = look(), read("cpu")
    for at, changes in ((backend, True), (other, False)):
        was = get_precision(at, "matmul")
        set_precision(at, "matmul", "ieee" if was == "tf32" else "tf32")
        try:
            assert (look() != before) is changes
            assert read("cpu") != all_before
        finally:
            set_precision(at, "matmul", was)
    assert look() == before and read("cpu") == all_before


def test_a_device_without_switches_or_autocast_has_a_state_too() -> None:
    look = plain_state("meta")
    before = look()
    assert is_plain(before) and look() == before
    with torch.no_grad():
        assert look() != before
    with torch.device("cpu"):
        assert not is_plain(look())


def turned(at: Any, name: str) -> Any:
    """A flag of torch.backends, the other way around."""
    on = getattr(at, name)
    return setting(lambda: on, lambda value: setattr(at, name, value), not on)


def precise(backend: str, op: str) -> Any:
    """Another precision of one backend's op."""
    was = get_precision(backend, op)
    put = functools.partial(set_precision, backend, op)
    return setting(lambda: was, put, "ieee" if was == "tf32" else "tf32")


cuda, math_sdp = torch.backends.cuda, torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp
CHOICES: dict[str, tuple[tuple[str, ...], Any]] = {
    "convolutions": (("cuda",), lambda: precise("cuda", "conv")),
    "recurrent nets": (("cuda",), lambda: precise("cuda", "rnn")),
    "convolutions of the CPU": (("cpu",), lambda: precise("mkldnn", "conv")),
    "recurrent nets of the CPU": (("cpu",), lambda: precise("mkldnn", "rnn")),
    "no oneDNN": (("cpu",), lambda: turned(torch.backends.mkldnn, "enabled")),
    "sums in half": (("cuda",), lambda: turned(cuda.matmul, "allow_fp16_accumulation")),
    "attention's sums in half": (
        ("cpu", "cuda"), lambda: setting(lambda: False, math_sdp, True),
    ),
    "attention's kernels in another order": (
        ("cpu", "cuda"), lambda: sdpa_kernel(
            [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION,
             SDPBackend.CUDNN_ATTENTION], set_priority=True,
        ),
    ),
}  # fmt: skip
if hasattr(torch._C, "_get_cublaslt_prefer_grouped_gemm"):  # torch 2.14
    CHOICES["grouped products"] = (
        ("cuda",), lambda: turned(cuda.matmul, "prefer_cublaslt_grouped_gemm")
    )  # fmt: skip


@pytest.mark.parametrize("name", CHOICES)
def test_each_choice_among_kernels_is_seen(name: str) -> None:
    """By the quick look, for its own device, and by the whole one."""
    devices, changed = CHOICES[name]
    looks = {device: plain_state(device) for device in devices}
    before, all_before = {d: look() for d, look in looks.items()}, read("cpu")
    with changed():
        assert all(look() != before[d] for d, look in looks.items())
        assert read("cpu") != all_before and hash(read("cpu"))
    assert {d: look() for d, look in looks.items()} == before and read("cpu") == all_before


UNASKED = {
    "by get_precision": ("cublas_allow_tf32", "cudnn_allow_tf32", "onednn_allow_tf32"),
    "solvers, which wait for the device": ("linalg_preferred_backend",),
    "rounds otherwise, and takes long to ask for": ("blas_preferred_backend",),
    "what may fail, not which kernel runs": (
        "deterministic_algorithms_warn_only", "deterministic_fill_uninitialized_memory",
    ),
    "other devices, or none that is chosen": (
        "miopen_immediate", "rocm_fa_preferred_backend", "overrideable_sdp_enabled",
        "blas_default_backend", "cudnn_batch_norm_reserve_space_size", "cudnn_depthwise_kernel",
        "nnpack_enabled", "cpu_allow_fp16_reduced_precision_reduction",
    ),
}  # fmt: skip


def test_no_switch_of_torchs_is_forgotten() -> None:
    """A version that has one more is asked about it here."""
    kinds = "sdp|blas|cudnn|mkldnn|onednn|deterministic|nnpack|miopen|reduction|tf32|fa3|rocm_fa"
    there = {n.removeprefix("_get_") for n in dir(torch._C) if n.startswith("_get_")}
    asked = {*SWITCHES["cpu"], *SWITCHES["cuda"], *(n for some in UNASKED.values() for n in some)}
    assert {name for name in there if re.search(kinds, name)} <= asked


def test_convolutions_may_be_more_precise_than_recurrent_nets() -> None:
    """Torch raises then, where it is asked for both at once."""
    step, state = captured(rowwise)
    with precise("cuda", "conv"):
        assert get_precision("cuda", "conv") != get_precision("cuda", "rnn")
        got, _ = step(state, toys.batch(3, 2))
    same(got, toys.bare(rowwise, toys.tally_params(), state, toys.batch(3, 2))[0])


class Scales(TorchFunctionMode):
    """Multiplies `torch.tanh` by what it holds: a number, or a list's only one."""

    def __init__(self, by: Any) -> None:
        super().__init__()
        self.by = by

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        by = self.by[0] if isinstance(self.by, list) else self.by
        return out * by if func is torch.tanh else out


def squashed(p: Any, s: Any, b: Any) -> Any:
    """A forward that such a mode changes."""
    return torch.tanh(p["w"][b.token_ids]), s


@pytest.mark.parametrize("by", [(2, 3, 2), (1.0, 1, True)])
def test_a_new_function_mode_at_each_call_is_traced_once(monkeypatch, by: Any) -> None:
    """It is what its class and its attributes are."""
    step, state = captured(squashed)
    traced, trace = [], tracing.trace_function
    monkeypatch.setattr(
        tracing, "trace_function", lambda *args: traced.append(args) or trace(*args)
    )
    for _ in range(3):
        for one in by:
            with Scales(one):
                got, _ = step(state, toys.batch(3, 2))
            same(got, torch.tanh(toys.tally_params()["w"][toys.batch(3, 2).token_ids]) * one)
    kinds = {(type(one), one) for one in by}
    assert len(traced) == len(kinds) and len(step.by_ambient) == 1 + len(kinds)


def test_function_modes_that_cannot_be_compared_are_not_kept_for_good() -> None:
    """Each is traced for; only the latest, and their graphs, stay."""
    step, state = captured(squashed)
    modes = []
    for i in range(MOST_AMBIENTS + 4):
        mode = Scales([float(i + 2)])
        modes.append(weakref.ref(mode))
        with mode:
            got, _ = step(state, toys.batch(3, 2))
        same(got, torch.tanh(toys.tally_params()["w"][toys.batch(3, 2).token_ids]) * (i + 2.0))
    del mode
    gc.collect()
    assert sum(ref() is not None for ref in modes) == MOST_AMBIENTS == len(step.by_ambient)
    step(state, toys.batch(3, 2))
    assert programs(step) <= MOST_AMBIENTS


def test_what_to_do_about_ambient_state_is_checked() -> None:
    """A misspelled choice is none."""
    with pytest.raises(TypeError, match="recapture"):
        graphified(rowwise, on_ambient="retrace")


def test_a_default_dtype_of_a_part_of_forward_is_that_parts_in_every_mode() -> None:
    """Ops take it from the trace, also when they run one by one."""

    def forward(p: Any, s: Any, b: Any) -> Any:
        with dtype(torch.float64)():
            return torch.ones(b.token_ids.shape[0]) * 0.1, s

    for modes in MODES:
        got, _ = graphified(forward, modes)(
            toys.tally_params(), toys.tally_state(), toys.batch(3, 2)
        )
        assert got.dtype is torch.float64


def test_ops_under_a_changed_state_are_other_ops() -> None:
    """The trace made under autocast casts."""
    traced = graphified(matmul).trace(
        toys.tally_params(), toys.tally_state(), batch=toys.batch(3, 2)
    )
    with autocast()():
        again = graphified(matmul).trace(
            toys.tally_params(), toys.tally_state(), batch=toys.batch(3, 2)
        )
    assert "bfloat16" in again.as_text() and "bfloat16" not in traced.as_text()


def test_weights_that_are_bound_again_wait_for_their_own_state() -> None:
    """New memory is captured anew, but not under a state that the keys are not of."""
    step, state = captured(matmul)
    step(state, toys.batch(3, 2))
    moved = {name: x.clone() for name, x in toys.tally_params().items()}
    step.binding.leaves[0].data = moved["w"]
    with autocast()():
        step.rebind(p=moved)
        assert len(step) == 0
    want, _ = matmul(moved, toys.clone(state), toys.batch(3, 2))
    assert torch.equal(step(state, toys.batch(3, 2))[0], want) and len(step) == 1


FIRST_CHOICE = """
import torch, fngraph as fg
from torch.nn.functional import scaled_dot_product_attention

def forward(params, state, x):
    return scaled_dot_product_attention(x @ params, x, x), state + 1

fast = fg.graphify(forward, modes="FULL", donate="state", stage="x")
w = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
x = torch.randn(2, 4, 16, 64, device="cuda", dtype=torch.bfloat16)
state = torch.zeros(3, device="cuda")
for n in range(3):
    out, state = fast(w, state, x)
    assert torch.equal(out, forward(w, state, x)[0])
(step,) = fast.steps
assert len(step.by_ambient) == 1 and state.tolist() == [3, 3, 3]
"""


@pytest.mark.gpu
def test_torch_s_first_choice_of_an_attention_kernel_is_no_change_of_forward_s():
    """On Hopper it puts cuDNN's first then, in a process that has chosen none before."""
    ran = subprocess.run([sys.executable, "-c", FIRST_CHOICE], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
