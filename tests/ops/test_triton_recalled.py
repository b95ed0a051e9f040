"""Calls of a backend over tensors that are elsewhere each time launch what the first one did."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import test_other_primitives as others
import torch
import toys
from toys import clone
from triton_cases import DEVICE, GPU, UNIFORM, WHERE

from fngraph.core import HostBounds
from fngraph.ops import ATTENTION
from fngraph.ops.primitives import Primitive
from fngraph.ops.triton import backends
from fngraph.ops.triton.repeating import Launches, Recalled
from fngraph.testing.cases import NAN, Case, arguments, case
from fngraph.torch_facts.names import TorchDispatchMode

pytestmark = [pytest.mark.gpu] if GPU else []
MODULES = {"triton": "attention.unified", "triton_decode": "attention.decode"}
BACKENDS = tuple(MODULES)
KINDS: dict[str, tuple[Any, int | None]] = {
    "one token": (UNIFORM[1] if GPU else [(1, 6), (1, 130)], 1), "verify": ([(3, 6), (3, 0)], 3),
    "mixed": ([(5, 2), (1, 9), (3, 0)], None), "one short request": ([(1, 3)], 1),
}  # fmt: skip
CALLS = 5
BLOCKS = 2100 if GPU else 40  # of each request's table


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How each call has run by now: "run", "kept" or "again"; nothing is remembered beforehand."""
    seen: list[str] = []
    plain, again = Recalled.__init__, Launches.again

    def init(self: Recalled, run: Callable[..., None]) -> None:
        def noted(args: Any, host: Any, kept: Any = None) -> None:
            seen.append("run" if kept is None else "kept")
            run(args, host, kept)

        plain(self, noted)

    monkeypatch.setattr(Recalled, "__init__", init)
    monkeypatch.setattr(Launches, "again", lambda *given: (seen.append("again"), again(*given))[1])
    for name in BACKENDS:
        monkeypatch.setitem(ATTENTION.backends, name, remade(name))
    return seen


def remade(name: str) -> Any:
    """A backend of attention that remembers nothing yet."""
    options = ATTENTION.backend(name).options
    return backends.backend(
        "attention", MODULES[name], backends.supports, name=name, options=options
    )


def call(c: Case, backend: str, query_len: int | None, **options: Any) -> torch.Tensor:
    """The output of the backend as bare `forward` gets it; the caches are written."""
    out = torch.full_like(c.q, NAN)
    given = arguments(c, out, **options)
    config, host = ATTENTION.configure(*given), HostBounds(max_query_len=query_len)
    ATTENTION.call(ATTENTION.backend(backend), given, config, host)
    return out


def check(c: Case, backend: str, query_len: int | None, **options: Any) -> None:
    """Raise where a call does something else than the backend without its memory."""
    own = dataclasses.replace(c, k_cache=c.k_cache.clone(), v_cache=c.v_cache.clone())
    got = call(c, backend, query_len, **options)
    given = arguments(own, torch.full_like(c.q, NAN), **options)
    config = ATTENTION.configure(*given)
    args = ATTENTION.make_args(given, config, None)
    kernels = backends.loaded("attention", backend, MODULES[backend], WHERE)
    kernels.run(args, HostBounds(max_query_len=query_len))
    assert torch.equal(got, args.out)
    for cache, expected in ((c.k_cache, own.k_cache), (c.v_cache, own.v_cache)):
        assert torch.equal(cache.nan_to_num(7), expected.nan_to_num(7))


def other(rows: Any, seed: int) -> Case:
    """A batch of these counts and other numbers, in memory of its own."""
    return case(*[(n, past // seed) for n, past in rows], seed=seed, B=BLOCKS, device=DEVICE)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("asked", ["plain", "rope", "scales"])
def test_alike_is_as_at_first(backend: str, kind: str, asked: str, ways: list[str]):
    rows, query_len = KINDS[kind]
    kept = []
    for i in range(CALLS):
        c = other(rows, i + 1)
        T, D = c.q.shape[0], c.q.shape[-1]
        turns = lambda: torch.randn(T, D // 2, device=DEVICE)  # noqa: B023, E731
        options: Any = {
            "plain": {},
            "rope": {"cos": turns(), "sin": turns()},
            "scales": {"k_scale": torch.tensor(0.5, device=DEVICE), "v_scale": None},
        }[asked]
        check(c, backend, query_len, **options)
        kept.append(c)  # so that the next is elsewhere
    assert ways == ["run", "kept", *["again"] * (CALLS - 2)]


CHANGES: dict[str, Callable[[Case], Case]] = {
    "strides": lambda c: dataclasses.replace(c, q=torch.cat([c.q, c.q], -1)[..., : c.q.shape[-1]]),
    "address": lambda c: dataclasses.replace(c, q=shifted(c.q, 1)),
    "blocks": lambda c: dataclasses.replace(c, meta=c.meta._replace(
        block_tables=torch.cat([c.meta.block_tables, c.meta.block_tables], 1))),
    "cache": lambda c: dataclasses.replace(c, k_cache=torch.cat([c.k_cache, c.k_cache])),
    "dtype": lambda c: dataclasses.replace(c, meta=c.meta._replace(
        slot_mapping=c.meta.slot_mapping.int())),
    "lengths of 64 bits": lambda c: dataclasses.replace(c, meta=c.meta._replace(
        seq_lens=c.meta.seq_lens.long(), query_start_loc=c.meta.query_start_loc.long())),
}  # fmt: skip


def shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """The same numbers, so many elements behind an address that 16 divides."""
    room = torch.empty(x.numel() + by, dtype=x.dtype, device=x.device)
    room[by:] = x.reshape(-1)
    return room[by:].view(x.shape)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_unlike_is_not_taken_for_alike(backend: str, change: str, ways: list[str]):
    rows, query_len = KINDS["one token"]
    for i in range(3):
        check(other(rows, i + 1), backend, query_len)
    assert ways.pop() == "again"
    for i in range(3):
        check(CHANGES[change](other(rows, i + 1)), backend, query_len)
    assert ways == ["run", "kept", "run", "kept", "again"]
    check(other(rows, 1), backend, query_len)
    check(other(rows, 1), backend, None)
    assert ways[5:] == ["again", "run"], "bounds of another kind"


def test_a_part_may_be_aligned_where_the_whole_is_not(ways: list[str]):
    for by in (1, 2, 1, 2, 3, 1, 2):
        c = other([(1, 6), (1, 130)], by)
        check(dataclasses.replace(c, q=shifted(c.q, by)), "triton", None)
    assert ways == ["run", "run", "kept", "kept", "run", "again", "again"]


@pytest.mark.gpu
def test_what_is_in_host_memory_is_left_to_triton(ways: list[str]):
    for i in range(CALLS):
        c = other([(1, 6), (1, 130)], i + 1)
        lens = c.meta.seq_lens.cpu().pin_memory()
        check(dataclasses.replace(c, meta=c.meta._replace(seq_lens=lens)), "triton", None)
    assert ways == ["run"] * CALLS


def test_parts_of_one_product_are_told_apart(ways: list[str]):
    for i in range(CALLS):
        c = other([(1, 6), (1, 130)], i + 1)
        whole = torch.cat([c.q, c.k, c.v], 1)
        q, k, v = whole.split([c.q.shape[1], c.k.shape[1], c.v.shape[1]], 1)
        check(dataclasses.replace(c, q=q, k=k, v=v), "triton_decode", 1)
    assert ways == ["run", "kept", *["again"] * (CALLS - 2)]


@pytest.mark.parametrize("why", ["gaps", "twice", "watched"])
def test_what_is_more_than_launches_is_run(why: str, ways: list[str]):
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None):
            return op(*args, **(kwargs or {}))

    for i in range(CALLS):
        c = other([(1, 6), (1, 130)], i + 1)
        if why == "gaps":  # q is made dense, by an op
            c = dataclasses.replace(c, q=torch.stack([c.q, c.q], -1)[..., 0])
        if why == "twice":
            c = dataclasses.replace(c, v=c.k)
        if why == "watched":
            given = arguments(c, torch.empty_like(c.q))
            args = ATTENTION.make_args(given, ATTENTION.configure(*given), None)
            with Watch():  # not by way of the op, below which no mode is active
                ATTENTION.backend("triton").run(args, None)  # type: ignore[misc]
        else:
            check(c, "triton", None)
    assert ways == ["run", "kept" if why == "gaps" else "run", *["run"] * (CALLS - 2)]


def test_where_tensors_will_be_is_known_or_nothing_is_made_again():
    room = torch.zeros(64, device=DEVICE)
    a, b, other = room[:16], room[16:32], torch.zeros(4, device=DEVICE)
    seen: list[Any] = []
    given: dict[str, tuple[list[torch.Tensor], torch.Tensor]] = {
        "one of them": ([a, b], b), "part of the only one there": ([a], room[4:8]),
        "part of which of two": ([a, b], b[4:8]), "none of them": ([a, b], other),
        "of no elements": ([a, b], other[:0]),
    }  # fmt: skip
    whole = {}
    for name, (tensors, launched) in given.items():
        launches = Launches(tensors)
        launches.add(lambda *x: seen.append(x), [launched, 3])
        launches.close()
        whole[name] = launches.whole
        if launches.whole:
            moved = torch.zeros(64, device=DEVICE)
            begin = launched.data_ptr() - tensors[-1].data_ptr()
            new = [moved[16 * i : 16 * i + 16] for i in range(len(tensors))]
            launches.again(new)
            (got, number), want = seen.pop(), new[-1].data_ptr() + begin
            assert (got if GPU else got.data_ptr()) == want and number == 3
            assert launches.kept[0].arguments[0] is None, "nothing of a call is kept for the next"
    assert whole == dict.fromkeys(list(given)[:2], True) | dict.fromkeys(list(given)[2:], False)


OTHERS = {
    "mla": (others.latent, {"mla": "triton_decode"}),
    "gated_delta": (others.delta, {"gated_delta": "triton", "causal_conv": "triton"}),
    "ssd": (others.mamba, {"ssd": "triton", "causal_conv": "triton"}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_primitives_in_bare_forward(name: str, monkeypatch: pytest.MonkeyPatch):
    model, chosen = OTHERS[name]
    params, cache = others.setup(model, WHERE)
    own, made, again = clone(cache), [], Launches.again
    suited = Primitive.suited
    monkeypatch.setattr(
        Primitive, "suited",
        lambda of, config: of.backends.get(chosen.get(of.name), None) or suited(of, config),
    )  # fmt: skip
    monkeypatch.setattr(Launches, "again", lambda *given: (made.append(1), again(*given))[1])
    for i in range(CALLS):
        batch = others.batch(WHERE, (2, 2 * i), (1, i), query_len=None)
        with monkeypatch.context() as at:
            at.setattr(Recalled, "__call__", lambda of, args, host: of._run(args, host))
            want, own = toys.bare(model, params, own, batch)
        got, cache = toys.bare(model, params, cache, batch)
        toys.assert_trees(got, want, atol=0, rtol=0)
        toys.assert_trees(cache, own, atol=0, rtol=0)
    assert len(made) >= (CALLS - 2) * len(chosen)
