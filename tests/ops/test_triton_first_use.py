"""No kernel is compiled in the middle of traffic: capture ahead has run every form of each."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from typing import Any

import pytest
import torch
import toys
from toys import clone
from triton_cases import GPU, RECORDER, WHERE

import fngraph as fg
import fngraph.ops.triton as wing
from fngraph.ops.triton import direct
from fngraph.ops.triton.repeating import Recalled
from fngraph.step import capture

pytestmark = [pytest.mark.gpu] if GPU else []
WING = [
    importlib.import_module(x.name)
    for x in pkgutil.walk_packages(wing.__path__, wing.__name__ + ".")
]
KERNELS = {
    f"{module.__name__}.{x.fn.__name__}": x
    for module in WING
    for x in vars(module).values()
    if hasattr(x, "arg_names")
}
VARYING = {"T", "R", "UNITS", "EACH", "many", "count"}  # what differs from batch to batch
REQS = 9
LIMITS = fg.Limits(48, REQS, B=toys.B)
BATCHES = [
    *(toys.decode(reqs, past=3, seed=reqs) for reqs in range(1, REQS + 1)),
    *(toys.batch(*[(2, 3)] * reqs, query_len=2) for reqs in (1, 3, 8)),
    toys.batch(1), toys.batch(8), toys.batch(7), toys.batch((1, 5), (3, 2)),
    toys.batch(*[(1, 4)] * 8), toys.batch((5, 0), *[(1, 4)] * 8), toys.batch(8, 4, 7),
]  # fmt: skip


@pytest.fixture
def forms(monkeypatch: pytest.MonkeyPatch) -> set[Any]:
    """Forms of kernels that have been compiled; under the interpreter, that a GPU would have."""
    made: set[Any] = set()
    monkeypatch.setattr(direct, "known", lambda kernel: None)  # what other tests have launched
    monkeypatch.setattr(Recalled, "__call__", lambda of, args, host: of._run(args, host))
    if GPU:
        from triton import knobs

        def note(*, key: Any, fn: Any, **_: Any) -> None:
            made.add((fn.name, key))

        monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", note)
        for kernel in KERNELS.values():
            kernel.device_caches.clear()  # forms that other tests have compiled in this process
        return made
    monkeypatch.setattr(capture, "compiles_kernels", lambda device: True)
    for module in WING:
        if (plain := vars(module).get("launch")) is None:
            continue

        def launch(
            kernel: Any, grid: Any, reads: Any, writes: Any, numbers: Any = (), *,
            plain: Any = plain, **options: Any,
        ) -> None:  # fmt: skip
            told = dict(zip(kernel.arg_names, (*reads, *writes, *numbers)))
            counts = kernel.kwargs["do_not_specialize"] or ()
            looks = [
                (x.dtype, x.data_ptr() % 16 == 0)
                if isinstance(x, torch.Tensor)
                else (x == 1, x % 16 == 0)
                for name, x in told.items()
                if name not in counts and not isinstance(x, float)
            ]
            made.add((kernel.fn.__name__, *looks, *options.items()))
            plain(kernel, grid, reads, writes, numbers, **options)

        monkeypatch.setattr(module, "launch", launch)
    return made


def shifted(batch: toys.Batch) -> toys.Batch:
    """The batch, its leaves in the middle of larger memory, as slices of a server's tables are."""
    leaves = {name: getattr(batch, name) for name in fg.core.buffers_of(toys.Batch)}
    moved = {name: torch.cat([x[:1], x])[1:] for name, x in leaves.items()}
    return dataclasses.replace(batch, **moved)


WAYS = [("triton", mode) for mode in (toys.MODES if GPU else ("NONE", "PIECEWISE"))]
WAYS += [("triton_decode", mode) for mode in ("NONE", "FULL_DECODE_ONLY") if GPU]


@pytest.mark.parametrize(("backend", "modes"), WAYS)
@pytest.mark.parametrize("passes", [(), "all"] if GPU else [()], ids=str)
def test_steps_find_every_kernel_compiled(modes: str, backend: str, passes: Any, forms: set[Any]):
    params = toys.attention_params(device=WHERE)
    cache = toys.attention_cache(blocks=REQS * toys.B, device=WHERE)
    fast = fg.graphify(
        toys.attend, donate="cache", stage="batch", sizes=(1, 2, 4, 8, 16, 48), modes=modes,
        limits=LIMITS, backends={"attention": backend}, recorder=RECORDER, passes=passes,
        query_lens=(1, 2),
    )  # fmt: skip
    step = fast.bind(params).capture(cache, progress=False)
    ready, own = set(forms), clone(cache)
    got = [clone(step(cache, shifted(toys.on(batch, WHERE)))[0]) for batch in BATCHES]
    assert ready and forms == ready, sorted(map(str, forms - ready))
    for batch, logits in zip(BATCHES, got):
        want, own = toys.bare(toys.attend, params, own, toys.on(batch, WHERE))
        toys.assert_trees(logits, want, atol=1e-5, rtol=1e-5)
    toys.assert_trees(cache, own, atol=1e-5, rtol=1e-5)


def test_counts_are_of_no_form():
    counting = 0
    for name, kernel in KERNELS.items():
        if not name.endswith("_kernel"):
            continue
        given = inspect.signature(kernel.fn).parameters
        plain = {n for n in VARYING if n in given and "constexpr" not in str(given[n].annotation)}
        told = kernel.do_not_specialize if GPU else kernel.kwargs["do_not_specialize"]
        assert plain <= set(told or ()), name
        counting += bool(plain)
    assert counting > 12
