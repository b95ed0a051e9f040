"""Launches that are made again do what the backend does, over whatever is in the tensors by now."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import test_other_primitives as others
import torch
import toys
from toys import clone
from triton_cases import DEVICE, GPU, RECORDER, UNIFORM, WHERE

import fngraph as fg
from fngraph.core import HostBounds
from fngraph.ops import ATTENTION
from fngraph.ops.triton import repeating
from fngraph.ops.triton.repeating import Launch, Launches, Repeated
from fngraph.testing.cases import NAN, Case, arguments, case

pytestmark = [pytest.mark.gpu] if GPU else []
KINDS: dict[str, tuple[Any, int | None]] = {
    "one token": (UNIFORM[1] if GPU else [(1, 6), (1, 130)], 1), "verify": ([(3, 6), (3, 0)], 3),
    "mixed": ([(5, 2), (1, 9), (3, 0)], None), "one short request": ([(1, 3)], 1),
}  # fmt: skip
BACKENDS = ("triton", "triton_decode")
CALLS = 5


def options_of(c: Case, name: str) -> dict[str, Any]:
    """What attention is asked besides the plain."""
    D, T = c.q.shape[-1], c.q.shape[0]
    turns = lambda: torch.randn(T, D // 2, device=c.q.device)  # noqa: E731
    return {
        "plain": {},
        "rope": {"cos": turns(), "sin": turns()},
        "scales": {"k_scale": torch.tensor(0.5, device=c.q.device), "v_scale": None},
    }[name]


def other(c: Case, seed: int) -> Case:
    """A batch of the same counts and other numbers: lengths, blocks, keys, queries."""
    rows = [(n, past // seed) for n, past in c.rows]
    return case(*rows, seed=seed, B=c.meta.block_tables.shape[1], device=DEVICE)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("asked", ["plain", "rope", "scales"])
def test_again_is_as_at_first(backend: str, kind: str, asked: str, monkeypatch: pytest.MonkeyPatch):
    rows, query_len = KINDS[kind]
    at = case(*rows, device=DEVICE)
    options, host = options_of(at, asked), HostBounds(max_query_len=query_len)
    out, by = torch.empty_like(at.q), ATTENTION.backend(backend)
    given = arguments(at, out, **options)
    config = ATTENTION.configure(*given)
    bound = ATTENTION.bind(by, given, config, stay=True)
    assert isinstance(bound, Repeated)
    ran: list[int] = []
    plain = bound._run
    monkeypatch.setattr(bound, "_run", lambda *given: (ran.append(1), plain(*given)))
    for i in range(CALLS):
        now = other(at, i + 1)
        at.load(now)
        out.fill_(NAN)
        junk = [torch.full((n,), NAN, device=DEVICE) for n in (4, 64, 1024, 40_000)]  # in its rooms
        del junk
        bound(host=host)
        want = torch.full_like(now.q, NAN)
        ATTENTION.call(by, arguments(now, want, **options), config, host)
        assert torch.equal(out, want)
        for cache, expected in ((at.k_cache, now.k_cache), (at.v_cache, now.v_cache)):
            assert torch.equal(cache.nan_to_num(7), expected.nan_to_num(7))
    assert len(ran) == 2, "from the third call on nothing but launches"


def test_other_bounds_are_other_launches():
    alike, unlike = ([(3, 6), (3, 0)], 3), ([(5, 6), (1, 4)], None)  # as many tokens and requests
    at = case(*alike[0], B=4, device=DEVICE)
    out, by = torch.empty_like(at.q), ATTENTION.backend("triton_decode")
    given = arguments(at, out)
    config = ATTENTION.configure(*given)
    bound = ATTENTION.bind(by, given, config, stay=True)
    for rows, query_len in (alike, alike, alike, unlike, alike, unlike, unlike, unlike):
        now, host = case(*rows, B=4, device=DEVICE), HostBounds(max_query_len=query_len)
        at.load(now)
        bound(host=host)
        want = torch.full_like(now.q, NAN)
        ATTENTION.call(by, arguments(now, want), config, host)
        assert torch.equal(out, want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_does_more_than_launch_is_run_each_time(backend: str):
    at = case(*KINDS["one token"][0], device=DEVICE)
    gaps = dataclasses.replace(at, q=torch.stack([at.q, at.q], -1)[..., 0])  # made dense by an op
    out, by = torch.empty_like(at.q), ATTENTION.backend(backend)
    given = arguments(gaps, out)
    config, host = ATTENTION.configure(*given), HostBounds(max_query_len=1)
    bound = ATTENTION.bind(by, given, config, stay=True)
    for i in range(CALLS):
        now = other(at, i + 1)
        gaps.load(now)
        bound(host=host)
        want = torch.full_like(now.q, NAN)
        ATTENTION.call(by, arguments(now, want), config, host)
        assert torch.equal(out, want)


def test_launches_are_made_on_their_own_device(monkeypatch: pytest.MonkeyPatch):
    current, seen = [0], []

    @contextlib.contextmanager
    def device(index: int) -> Iterator[None]:
        current[0], before = index, current[0]
        yield
        current[0] = before

    monkeypatch.setattr(repeating, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "device", device)
    launches = Launches()
    launches._device = 1
    launches.kept.append(Launch(lambda: seen.append(current[0]), [], ()))
    launches.again()
    current[0] = 1
    launches.again()
    assert seen == [1, 1] and current == [1]


def test_addresses_are_those_of_the_call(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(repeating, "current_device", lambda: 0)
    empty, seen = torch.empty, []
    x, y = torch.zeros(16), torch.zeros(16)
    with Launches([x]) as made:
        one, two = x.new_empty(75), x.new_empty(10)
        made.add(lambda *given: seen.append(given), [x[4:], one, two[3:], 7])
    made.close()
    made._device = 0  # as if they were on a GPU: launched by address
    rooms, filled = [empty(1024, dtype=torch.uint8) for _ in range(2)], []
    fill = repeating._filled
    monkeypatch.setattr(repeating, "_filled", lambda *given: (filled.append(1), fill(*given))[1])
    for z, room, anew in ((x, 0, 1), (x, 0, 0), (y, 0, 1), (y, 1, 1), (y, 1, 0), (x, 1, 1)):
        monkeypatch.setattr(torch, "empty", lambda *a, n=room, **k: rooms[n])
        made.again([z])
        begin = rooms[room].data_ptr()
        assert seen.pop() == (z.data_ptr() + 16, begin, begin + 512 + 12, 7)
        assert len(filled) == anew and not seen, "arguments are kept while all is where it was"
        filled.clear()
    assert made.room == (1024, x.device) and made.whole


def test_memory_lasts_for_a_call_and_no_longer(monkeypatch: pytest.MonkeyPatch):
    """Another thread's call on the stream would get it else, or nobody ever."""
    monkeypatch.setattr(repeating, "current_device", lambda: 0)
    empty, held = torch.empty, []

    def noted(*sizes: Any, **options: Any) -> torch.Tensor:
        made = empty(*sizes, **options)
        held.append(weakref.ref(made))
        return made

    with Launches([]) as made:
        room = empty(8)
        made.add(lambda address: alive.append(held[-1]() is not None), [room])
    made.close()
    made._device, alive = 0, []
    monkeypatch.setattr(torch, "empty", noted)
    for _ in range(2):
        made.again()
        assert held[-1]() is None
    assert alive == [True, True]


def test_rooms_on_two_devices_are_left_to_the_backend():
    with Launches([]) as made:
        torch.empty(8)
        torch.empty(8, device="meta")
    assert not made.whole


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("query_len", [1, None])
def test_steps_between_graphs(backend: str, query_len: int | None):
    params = toys.attention_params(device=WHERE)
    cache = toys.attention_cache(blocks=4 * toys.B, device=WHERE)
    own = clone(cache)
    fast = fg.graphify(
        toys.attend, donate="cache", stage="batch", sizes=(4, 8), modes="PIECEWISE",
        limits=fg.Limits(8, 4, B=toys.B), backends={"attention": backend}, recorder=RECORDER,
    )  # fmt: skip
    step = fast.bind(params).capture(cache, progress=False)
    for i in range(CALLS):
        batch = (
            toys.decode(3, past=2 + i, seed=i) if query_len else toys.batch((1, 4), (2, i), seed=i)
        )
        batch = toys.on(batch, WHERE)
        got = clone(step(cache, batch)[0])
        want, own = toys.bare(toys.attend, params, own, batch)
        toys.assert_trees(got, want, atol=1e-5, rtol=1e-5)
    toys.assert_trees(cache, own, atol=1e-5, rtol=1e-5)


OTHERS = {
    "mla": (others.latent, {"mla": "triton"}),
    "mla decode": (others.latent, {"mla": "triton_decode"}),
    "gated_delta": (others.delta, {"gated_delta": "triton", "causal_conv": "triton"}),
    "ssd": (others.mamba, {"ssd": "triton", "causal_conv": "triton"}),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("query_len", [1, None])
def test_other_primitives_between_graphs(
    name: str, query_len: int | None, monkeypatch: pytest.MonkeyPatch
):
    model, backends = OTHERS[name]
    params, cache = others.setup(model, WHERE)
    own, made = clone(cache), []
    again = Launches.again

    def between_graphs(kept: Launches, *tensors: Any) -> None:
        if not tensors:  # or it is bare forward's, recalled
            made.append(len(kept.kept))
        again(kept, *tensors)

    monkeypatch.setattr(Launches, "again", between_graphs)
    fast = fg.graphify(
        model, modes="PIECEWISE", donate="cache", stage="batch", sizes=toys.SIZES, backends=backends
    )
    step = fast.bind(params).capture(cache, toys.LIMITS, recorder=RECORDER, progress=False)
    for i in range(CALLS):
        rows: list[Any] = [(1, i), (1, i)] if query_len else [(2, 2 * i), (1, i)]
        batch = others.batch(WHERE, *rows, query_len=query_len)
        want, own = toys.bare(model, params, own, batch)
        got, cache = step(cache, batch)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
        toys.assert_trees(cache, own, atol=1e-5, rtol=1e-5)
    assert len(made) == (CALLS - 2) * len(backends) and all(made)
