"""Launches past Triton's own look at arguments: only of what it would launch, which is compiled."""

from __future__ import annotations

import itertools
import random
import sys
from typing import Any

import pytest
import torch
from test_triton_compiles import needs_triton, run_alone
from torch import Tensor
from triton_cases import DEVICE

from fngraph.ops.triton import direct
from fngraph.ops.triton.launching import interpreted

NUMBERS = (0, 1, 2, 15, 16, 17, -1, -16, 2**31 - 1, 2**31, 2**31 + 8, -(2**31), -(2**31) - 16,
           2**32, 2**63 - 1, 2**63, 2**64 - 1, True, False, None, 1.0, 0.5)  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.float8_e4m3fn)


def tensor(pick: random.Random) -> Tensor:
    """With an address that 16 divides, or not."""
    dtype = pick.choice(DTYPES)
    return torch.empty(64, dtype=torch.uint8)[pick.choice((0, 8, 16, 24)) :].view(dtype)


def keys() -> str:
    """Random arguments as we and as Triton tell them apart: "same", or where not."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import create_function_from_signature

    kernel: Any = toy_kernel()
    plain = CUDABackend(GPUTarget("cuda", 90, 32))
    binder = create_function_from_signature(kernel.signature, kernel.params, plain)
    of, pick = direct.known(kernel), random.Random(1)
    assert of is not None
    given: dict[Any, set[Any]] = {}
    back: dict[Any, set[Any]] = {}
    for _ in range(20_000):
        few = pick.random() < 0.9  # so that many are alike
        x, out = tensor(pick), tensor(pick)
        if few:
            x, out = x.view(torch.uint8).view(torch.int32), out.view(torch.uint8).view(torch.int32)
        a, n = (pick.choice(NUMBERS) for _ in range(2))
        constants = {"BLOCK": pick.choice((16, 32)), "ADDS": pick.choice((True, False))}
        options = {"num_warps": pick.choice((2, 4))}
        _, triton, rest = binder(x, out, a, n, **constants, **options)
        theirs = str((triton, rest))
        addresses = [y.data_ptr() for y in (x, out)]
        ours = of.key((x, out), addresses, (a, n), constants, options)
        given.setdefault(ours, set()).add(theirs)
        narrow = type(n) is int and -(2**31) <= n < 2**31
        back.setdefault(
            (theirs, type(a), a, x.data_ptr() % 16, out.data_ptr() % 16, narrow or n), set()
        ).add(ours)
    assert len(given) > 1000
    assert all(len(x) == 1 for x in given.values()), "two are taken for one"
    assert all(len(x) == 1 for x in back.values()), "one is looked at twice"
    assert of.key((), (), (torch.tensor(1),), {}, {}) is None, "of another type"
    assert len({of.key((), (), (), {"C": c}, {}) for c in (1, 1.0, True)}) == 3
    return "same"


def toy_kernel() -> Any:
    """A kernel of Triton's, of two tensors, a number, a number that varies, and constants."""
    import triton
    import triton.language as tl

    @triton.jit(do_not_specialize=("n",))
    def toy(x, out, a, n, BLOCK: tl.constexpr, ADDS: tl.constexpr):
        i = tl.arange(0, BLOCK)
        there = i < n
        y = tl.load(x + i, mask=there, other=0)
        tl.store(out + i, y + a if ADDS else y, mask=there)

    globals()["tl"], globals()["triton"] = tl, triton
    return toy


class Watch:
    """A driver that launches nothing, and what it was asked to launch, by whom."""

    def __init__(self) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.runtime.driver import driver
        from triton.runtime.jit import JITFunction

        self.launched: list[Any] = []
        self.by_triton = 0
        self.launcher_cls = lambda src, metadata: self.note
        self.utils = self
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: 7
        self.get_current_target = lambda: GPUTarget("cuda", 90, 32)
        self.get_device_properties = lambda device: {"max_shared_mem": 1 << 17}
        handles = itertools.count(1)
        self.load_binary = lambda *given: (1, next(handles), 32, 0, 1024)
        driver.set_active(self)
        own = JITFunction.run

        def run(*args: Any, **kwargs: Any) -> Any:
            self.by_triton += 1
            return own(*args, **kwargs)

        JITFunction.run = run

    def note(self, x: int, y: int, z: int, stream: int, function: int, packed: Any,
             metadata: Any, enter: Any, leave: Any, *args: Any) -> None:  # fmt: skip
        self.launched.append(((x, y, z), stream, function, packed, args, enter is not None))

    def take(self) -> tuple[int, Any]:
        """How many launches Triton has made since the last time, and the last of all."""
        many, self.by_triton = self.by_triton, 0
        return many, self.launched[-1]


def launches() -> str:
    """Launches of the toy by either way, as a driver sees them: "alike"."""
    from triton import knobs

    watch, kernel, more = Watch(), toy_kernel(), {"BLOCK": 16, "ADDS": True}
    whole = torch.zeros(256, dtype=torch.int32)
    out = whole[64:]

    def go(x: Tensor, n: int, a: int = 3, **options: Any) -> tuple[int, Any]:
        given = (x, out)
        direct.launch(kernel, (2, 3), given, (a, n), more, {"num_warps": 4, **options}, 0)
        return watch.take()

    def by_triton(x: Tensor, n: int, a: int = 3) -> Any:
        kernel[2, 3](x, out, a, n, num_warps=4, **more)
        return watch.take()[1]

    one, two, odd = whole[:16], whole[16:32], whole[1:17]
    first = go(one, 5)
    assert first[0] == 1, "Triton compiles"
    again = go(two, 9)
    assert again[0] == 0
    same(again[1], by_triton(two, 9))
    assert go(one, 1)[0] == 0, "n varies"
    unaligned = go(odd, 5)
    assert unaligned[0] == 1
    assert unaligned[1][2] != first[1][2], "another function"
    apart = go(odd, 6)
    assert apart[0] == 0
    assert apart[1][2] == unaligned[1][2]
    same(apart[1], by_triton(odd, 6))
    assert [go(one, 5, a)[0] for a in (1, 1, 16, 16, 7, 2**40, 2**40)] == [1, 0, 1, 0, 1, 1, 0]
    assert [go(one, 5, num_warps=8)[0] for _ in range(2)] == [1, 0]

    made = direct.launch(kernel, (2, 3), (one, out), (3, 5), more, {"num_warps": 4}, 0)
    watch.take()
    once_more = direct.again(made, (4,), 0)
    once_more(one, out, 3, 5, *more.values())
    many, last = watch.take()
    assert (many, last[0], last[2], last[5]) == (0, (4, 1, 1), first[1][2], False)
    told: list[Any] = []
    knobs.runtime.launch_enter_hook.add(told.append)
    assert go(two, 9)[0] == 1, "hooks are Triton's"
    once_more(one, out, 3, 5, *more.values())
    assert watch.take()[1][5], "the driver is given the hooks"
    knobs.runtime.launch_enter_hook.remove(told.append)
    kernel.add_pre_run_hook(lambda *args, **kwargs: told.append(1))
    assert go(two, 9)[0] == 1
    kernel.pre_run_hooks.clear()
    assert told == [1]
    knobs.runtime.debug = True
    assert go(two, 9)[0] == 1
    knobs.runtime.debug = False
    assert go(two, 9)[0] == 0
    direct.SEEN = ("0.",)
    direct.was_seen.cache_clear()
    kernel = toy_kernel()
    assert [go(two, 9)[0] for _ in range(3)] == [1, 1, 1], "another version"
    return "alike"


def same(a: Any, b: Any) -> None:
    """Raise where two launches differ; constants are not passed on."""
    assert a[:4] == b[:4]
    for x, y in zip(a[4], b[4], strict=True):
        assert x is y or x == y


@pytest.mark.sampled(1)
@needs_triton
@pytest.mark.parametrize("what", ["keys", "launches"])
def test_by_a_driver_that_launches_nothing(what: str, tmp_path):
    assert run_alone(__file__, tmp_path, what).split() == [{"keys": "same"}.get(what, "alike")]


def test_interpreted_kernels_are_left_to_triton():
    from fngraph.ops.triton.attention.writing import write_kernel

    assert (direct.known(write_kernel) is None) == interpreted()


@pytest.mark.gpu
def test_on_a_gpu_launches_are_those_of_triton():
    from fngraph.ops.fused import plain_rms_norm

    weight = torch.randn(80, device=DEVICE).bfloat16()
    for _ in range(3):
        for begin in (0, 1, 8, 3):  # addresses that 16 divides, and not
            x = torch.randn(4 * 80 + 8, device=DEVICE).bfloat16()[begin : begin + 320].view(4, 80)
            got = torch.ops.fngraph.rms_norm(x, weight, 1e-5, False)
            torch.testing.assert_close(got, plain_rms_norm(x, weight, 1e-5, False))


if __name__ == "__main__":
    assert not interpreted()
    print({"keys": keys, "launches": launches}[sys.argv[1]]())
