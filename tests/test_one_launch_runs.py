"""A decoder's layers as one launch, run on a GPU beside the usual kernels."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from one_launch_cases import (
    BLOCK,
    LIMITS,
    NAMES,
    batch_of,
    batch_of_one_sequence,
    batch_of_some,
    cache_of,
    family_and_config,
    found_in,
    graphified,
    params_of,
    traced,
    trees_map,
)
from torch import Tensor

import fngraph as fg
from fngraph.ops.megakernel import _loaded, image


def with_and_without(name: str, **options: Any) -> Any:
    """A step whose keys of few requests are one launch, and one without; and a cache like theirs
    before."""
    family, config = family_and_config(name)
    params = params_of(family, config, "cuda")
    steps = []
    for megakernel in (True, False):
        cache = cache_of(config, "cuda")
        fast = graphified(family, megakernel=megakernel, **options).bind(params)
        steps.append((fast.capture(cache, LIMITS, progress=False), cache))
    return family, params, steps, cache_of(config, "cuda")


def as_before(steps: Any, old: Any) -> None:
    """Caches that are alike, whatever tests have run by now."""
    for _, cache in steps:
        for x, y in zip((x for kv in cache for x in kv), (y for kv in old for y in kv)):
            x.copy_(y)


@pytest.fixture(scope="module", params=NAMES)
def of_one(request: pytest.FixtureRequest) -> Any:
    return with_and_without(request.param)


@pytest.fixture(scope="module", params=NAMES)
def of_few(request: pytest.FixtureRequest) -> Any:
    return with_and_without(request.param, sizes=(2, 4))


@pytest.fixture
def ran(of_one: Any) -> Any:
    """Steps of one request, with the one launch and without."""
    *_, steps, old = of_one
    as_before(steps, old)
    return of_one[:-1]


@pytest.fixture
def few(of_few: Any) -> Any:
    """Steps of up to four requests, likewise."""
    *_, steps, old = of_few
    as_before(steps, old)
    return steps


def kernels(step: Any, requests: int = 1) -> set[str]:
    """Those of the key of so many requests, a token each."""
    spec = fg.BatchSpec(requests, requests, query_len=1)
    counts = step[step.dispatch(spec).descriptor].counts
    return {name for name, _ in counts.names}


def close(got: Tensor, want: Tensor) -> None:
    """Norm over norm, of numbers that bfloat16 has rounded in another order."""
    apart = (got.double() - want.double()).norm() / want.double().norm()
    assert apart < 0.03, apart


@pytest.mark.gpu
def test_its_key_has_one_kernel_for_the_layers(ran: Any) -> None:
    """And attention has none."""
    *_, ((step, _), (other, _)) = ran
    assert any("megakernel" in name for name in kernels(step))
    assert not any("attention" in name or "skinny" in name for name in kernels(step))
    assert not any("megakernel" in name for name in kernels(other))


LENGTHS = (1, 2, 15, 16, 17, 127, 128, 129, 255, 500, 512, 513, 900, 1025, 2048, 2049, 2560)


@pytest.mark.gpu
@pytest.mark.parametrize("length", LENGTHS)
def test_a_step_is_as_without_it(ran: Any, length: int) -> None:
    """At the edges of blocks, of a warp's keys, of splits, and beyond all splits."""
    *_, steps = ran
    batch = batch_of(length, "cuda")
    results = []
    for step, cache in steps:
        _, logits, _ = step(cache, batch)
        results.append((logits, [x[batch.slot_mapping // BLOCK, batch.slot_mapping % BLOCK]
                                 for kv in cache for x in kv]))  # fmt: skip
    (logits, wrote), (want, kept) = results
    close(logits, want)
    for a, b in zip(wrote, kept):
        close(a, b)


@pytest.mark.gpu
def test_it_is_as_near_to_float64_as_a_bare_step(ran: Any) -> None:
    """Of the same weights and cache; on the whole, since by chance a single step's error is a
    tenth more or less."""
    family, params, ((one, cache), _) = ran
    wide = trees_map(lambda x: x.double(), params)
    logits: list[tuple[Tensor, ...]] = []
    for length in range(200, 520, 20):
        batch = batch_of(length, "cuda", token=length)
        exact, _ = family.forward(wide, trees_map(lambda x: x.double(), cache), batch)
        bare, _ = family.forward(params, trees_map(Tensor.clone, cache), batch)
        logits.append((one(cache, batch)[1].double(), bare.double(), exact))
    got, bare, exact = map(torch.cat, zip(*logits))
    errors = [float((x - exact).norm() / exact.norm()) for x in (got, bare)]
    assert errors[0] <= 1.1 * errors[1], errors


@pytest.mark.gpu
def test_tokens_one_after_another(ran: Any) -> None:
    """Words of the step before are none of this one's."""
    *_, steps = ran
    logits = []
    for step, cache in steps:
        made = []
        for length in range(100, 140):
            made.append(step(cache, batch_of(length, "cuda", token=length))[1].clone())
        logits.append(torch.cat(made))
    close(*logits)


@pytest.mark.gpu
@pytest.mark.parametrize("slot", [-1, 3, 16 * 5 + 2])
def test_a_slot_that_is_not_the_tables(ran: Any, slot: int) -> None:
    """-1 writes nothing, and the token reads what lies there; another slot is written."""
    *_, steps = ran
    batch = batch_of(400, "cuda", slot=slot)
    states = [[x.clone() for kv in cache for x in kv] for _, cache in steps]
    logits = [step(cache, batch)[1] for step, cache in steps]
    close(*logits)
    for (_, cache), before in zip(steps, states):
        for x, old in zip((x for kv in cache for x in kv), before):
            changed = (x != old).flatten(2).any(-1).flatten().nonzero().flatten().tolist()
            assert changed in ([], [slot])
            assert slot >= 0 or not changed


@pytest.mark.gpu
def test_a_request_of_no_tokens(ran: Any) -> None:
    """A request of no tokens, as padding is: attention gives zeros, and nothing is written."""
    *_, ((_, cache), _) = ran
    before = [x.clone() for kv in cache for x in kv]
    none = torch.zeros(1, dtype=torch.int32, device="cuda")
    batch = dataclasses.replace(batch_of(5, "cuda", slot=-1), seq_lens=none)
    close(*(each(kept, batch)[1] for each, kept in ran[2]))
    torch.cuda.synchronize()
    for x, old in zip((x for kv in cache for x in kv), before):
        assert torch.equal(x, old)


@pytest.mark.gpu
def test_keys_of_few_have_one_kernel_for_the_layers(few: Any) -> None:
    """And attention has none."""
    (step, _), _ = few
    for n in (2, 4):
        names = kernels(step, n)
        assert any("megakernel" in name for name in names)
        assert not any("attention" in name or "split" in name for name in names)


FEW = ((5, 300), (128, 129), (1, 2300), (2000,), (17, 128, 129, 513), (2000, 1, 1, 1),
       (300, 16, 700), (640, 640, 640, 640), (1, 1, 1, 1), (30, 1900, 400, 200))  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", FEW, ids=str)
def test_a_few_requests_are_as_without_it(few: Any, lengths: tuple[int, ...]) -> None:
    """Of lengths that share the programs evenly or not, and with padding in a key of more."""
    batch = batch_of_some(lengths, "cuda")
    results = []
    for step, cache in few:
        tokens, logits, _ = step(cache, batch)
        assert logits.shape[0] == tokens.shape[0] == len(lengths)
        results.append((logits, [x[batch.slot_mapping // BLOCK, batch.slot_mapping % BLOCK]
                                 for kv in cache for x in kv]))  # fmt: skip
    (logits, wrote), (want, kept) = results
    for got, other in zip(logits, want):
        close(got, other)
    for a, b in zip(wrote, kept):
        close(a, b)


@pytest.fixture(scope="module")
def of_an_8b() -> Any:
    return with_and_without("layers of an 8B", sizes=(1, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(300,), (2300,), (5, 300), (129, 2300)], ids=str)
def test_layers_of_an_8b(of_an_8b: Any, lengths: tuple[int, ...]) -> None:
    """One request or two, as many as there is memory for."""
    *_, steps, old = of_an_8b
    as_before(steps, old)
    batch = batch_of_some(lengths, "cuda")
    (got, want) = (step(cache, batch)[1] for step, cache in steps)
    for one, other in zip(got, want):
        close(one, other)
    assert any("megakernel" in name for name in kernels(steps[0][0], len(lengths)))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "rows", [(0, 1, 2, 3), (3, 1, 0, 2), (2, 2, 2, 2), (-1, -4, 1, -2)], ids=str
)
def test_rows_of_logits_as_they_are_asked_for(few: Any, rows: tuple[int, ...]) -> None:
    """In any order, counted from either end."""
    batch = batch_of_some((20, 30, 40, 50), "cuda", rows)
    (got, _), (want, _) = ((step(cache, batch)[1], cache) for step, cache in few)
    for one, other in zip(got, want):
        close(one, other)


@pytest.mark.gpu
def test_a_request_reads_what_another_writes(few: Any) -> None:
    """Tokens of one sequence, a request each, in steps that follow one another."""
    for begin in range(120, 140, 4):
        batch = batch_of_one_sequence(range(begin, begin + 4), "cuda")
        (got, cache), (want, other) = ((step(kept, batch)[1], kept) for step, kept in few)
        for one, usual in zip(got, want):
            close(one, usual)
        as_before([few[1]], cache)
        assert other is few[1][1]


@pytest.mark.gpu
def test_requests_know_nothing_of_one_another(few: Any) -> None:
    """A row is the same beside others, and beside what is no number."""
    (step, cache), _ = few
    logits = [step(cache, batch_of_some(lengths, "cuda"))[1][0].clone()
              for lengths in ((50, 30, 30, 30), (50, 100, 7, 1))]  # fmt: skip
    assert torch.equal(*logits)
    batch = batch_of_some((50, 30, 30), "cuda")
    want = step(cache, batch)[1].clone()
    for kv in cache:
        for x in kv:
            x[batch.block_tables[1, 0], 0] = float("nan")
    got = step(cache, batch)[1]
    assert torch.equal(got[0], want[0]) and torch.equal(got[2], want[2]) and got[1].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_memory_of_a_multiprocessor_is_as_reckoned(name: str, tokens: int) -> None:
    """By which it is known how many tokens fit."""
    family, config = family_and_config(name)
    stage, *_ = traced(family, config)
    made = found_in(stage).decoder._replace(tokens=tokens)
    torch.zeros(1, device="cuda")  # a context, for who comes first
    programs = torch.cuda.get_device_properties(0).multi_processor_count
    assert _loaded(made, 0, image.compiled).shared == made.shared(programs)


@pytest.mark.gpu
def test_weights_that_lie_apart_run_as_usual(caplog: pytest.LogCaptureFixture) -> None:
    """Another launch for each, the same logits, and a warning that says what to do."""
    family, config = family_and_config("llama")
    logits = []
    for apart in (True, False):
        cache = cache_of(config, "cuda")
        fast = graphified(family).bind(params_of(family, config, "cuda", apart))
        step = fast.capture(cache, LIMITS, progress=False)
        assert any("megakernel" in name for name in kernels(step)) == (not apart)
        logits.append(step(cache, batch_of(50, "cuda"))[1])
    close(*logits)
    told, *_ = [r.getMessage() for r in caplog.records if "one launch" in r.getMessage()]
    assert "layer 0 do not lie side by side" in told
    assert "fg.ops.lay_side_by_side(params)" in told


@pytest.mark.gpu
def test_compiled_pieces_around_it() -> None:
    """At level "pieces", which has code of its own ahead of the launch and behind it."""
    family, config = family_and_config("llama")
    params, logits = params_of(family, config, "cuda"), []
    for megakernel in (True, False):
        cache = cache_of(config, "cuda")
        fast = graphified(family, compile="pieces", passes=None, megakernel=megakernel)
        step = fast.bind(params).capture(cache, LIMITS, progress=False)
        assert any("megakernel" in name for name in kernels(step)) == megakernel
        logits.append(step(cache, batch_of(50, "cuda"))[1].clone())
        logits.append(step(cache, batch_of_some((60, 9), "cuda"))[1].clone())
    close(logits[0], logits[2])
    close(logits[1], logits[3])


@pytest.mark.gpu
def test_asleep_and_awake_again() -> None:
    """Buffers that lie elsewhere afterwards."""
    family, config = family_and_config("llama")
    cache = cache_of(config, "cuda")
    fast = graphified(family, outputs="own").bind(params_of(family, config, "cuda"))
    step = fast.capture(cache, LIMITS, progress=False)
    want = step(cache, batch_of(50, "cuda"))[1].clone()
    step.sleep()
    hole = torch.zeros(1 << 20, device="cuda")
    step.wake()
    assert any("megakernel" in name for name in kernels(step))
    assert torch.equal(step(cache, batch_of(50, "cuda"))[1], want)
    del hole


@pytest.mark.gpu
def test_two_steps_of_one_function_at_once() -> None:
    """Each has words of its own, on streams that overlap."""
    family, config = family_and_config("qwen3")
    fast = graphified(family).bind(params_of(family, config, "cuda"))
    caches = [cache_of(config, "cuda") for _ in range(2)]
    steps = [fast.capture(cache, LIMITS, progress=False) for cache in caches]
    batches = [batch_of(60 + i, "cuda") for i in range(2)]
    want = [x(cache, batch)[1].clone() for x, cache, batch in zip(steps, caches, batches)]
    streams = [torch.cuda.Stream() for _ in steps]
    torch.cuda.synchronize()
    got: list[list[Tensor]] = [[], []]
    for _ in range(30):
        for i, (step, cache, stream) in enumerate(zip(steps, caches, streams)):
            with torch.cuda.stream(stream):
                got[i].append(step(cache, batches[i])[1])
    torch.cuda.synchronize()
    assert all(torch.equal(x, want[i]) for i in range(2) for x in got[i])
