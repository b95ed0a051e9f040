"""Adapters: each row's own low-rank update, in every mode, loaded without a capture."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

import fngraph as fg
from fngraph.models import Policy, generate, llama, loading, lora, naming
from fngraph.models.serving.batches import batch_type, empty_batch, lay_out
from fngraph.models.serving.requests import Job, Request, Row
from fngraph.models.serving.texts.tokens import Tokens
from tests.models import tiny
from tests.models.conftest import wide_params
from tests.traced_once import Kept, traced_once

COUNT, RANK, BLOCK_SIZE, B = 3, 4, 4, 4
POLICY = Policy(16, 8, B, BLOCK_SIZE, share=False)
LIMITS = POLICY.limits
TEXTS = [(7, 8, 9, 10, 11), (250, 3, 99), (42,), (100, 90, 80, 70)]
NAMES = (*lora.ATTENTION, "w_gate", "w_down")


def batch_of(ids: list[int], *, decode: bool = False) -> Any:
    """A step of the first texts, request i with adapter ids[i]."""
    rows = []
    for i, (text, adapter) in enumerate(zip(TEXTS, ids)):
        tokens, computed = Tokens(text + (5,) * decode), len(text) * decode
        blocks = Tokens((2 * i, 2 * i + 1), np.int32)
        job = Job(Request(i, text, 1, adapter=adapter), tokens, computed, blocks, -1)
        rows.append(Row(job, job.missing))
    return lay_out(rows, POLICY, lambda spec: empty_batch(batch_type("adapters"), POLICY, spec))


def forward(params: Any, cache: Any, batch: batch_type("adapters")) -> Any:
    """`llama.forward`, (R, V)."""
    logits_R1V, cache = llama.forward(params, cache, batch)
    return logits_R1V[:, 0], cache


def random_adapter(adapters: lora.Adapters, seed: int, rank: int = RANK) -> Any:
    """What `load_slot` takes."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator) * 0.2  # noqa: E731
    pairs = {
        (i, name): (draw(rank, pair.a.shape[2]), draw(rank, pair.b.shape[2]))
        for i, own in enumerate(adapters)
        for name, pair in own.items()
    }
    return lora.one_slot(adapters, pairs)


def merged(params: llama.Params, one: Any) -> llama.Params:
    """The weights that the adapter amounts to."""

    def update(own: Any, name: str, weight: Tensor) -> Tensor:
        if name not in own:
            return weight
        return weight + (own[name].a.T @ own[name].b).T.to(params.embed)

    layers = tuple(
        naming.replaced(layer, functools.partial(update, own))
        for layer, own in zip(params.layers, one)
    )
    return dataclasses.replace(params, layers=layers)


def cache_of(params: llama.Params) -> Any:
    """Blocks for all texts."""
    device = params.embed.device
    return llama.init_cache(params.config, 8, block_size=BLOCK_SIZE, device=device)


def alone(params: llama.Params, ids: list[int], ones: dict[int, Any]) -> list[Tensor]:
    """Bare logits of a prefill and a decode, each request by itself over merged weights."""
    prefill, decode = [], []
    for i, adapter in enumerate(ids):
        own = merged(params, ones[adapter]) if adapter >= 0 else params
        cache = cache_of(params)
        for out, step in ((prefill, False), (decode, True)):
            whole = batch_of([-1] * len(ids), decode=step)
            names = fg.core.buffers_of(type(whole))
            moved = {n: getattr(whole, n).to(params.embed.device) for n in names}
            logits_RV, cache = forward(own, cache, dataclasses.replace(whole, **moved))
            out.append(logits_RV[i])
    return [torch.stack(prefill), torch.stack(decode)]


def make(
    params: llama.Params, recorder: str, modes: str, traces: Kept, counts: Any = (COUNT,),
    *, lazy: bool = False,
) -> Any:  # fmt: skip
    """A captured step, its cache and its slots."""
    adapters, cache = lora.slots(params, count=COUNT, rank=RANK, names=NAMES), cache_of(params)
    fast = fg.graphify(
        lora.adapted(forward), modes=modes, donate="cache", stage="batch", sizes=(4, 16),
        recorder=recorder, adapters=counts,
    )  # fmt: skip
    with traced_once(traces, params.embed.device):
        step = fast.bind(params, adapters).capture(
            cache, LIMITS, batch=batch_of([0, -1]), lazy=lazy, progress=False
        )
    return step, cache, adapters


@pytest.fixture(scope="module")
def traces() -> Kept:
    """Of the adapted `forward`, for all modes and counts."""
    return {}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("modes", ["FULL_AND_PIECEWISE", "FULL", "PIECEWISE", "NONE"])
def test_each_row_has_its_own_adapter(modes, recorder_name, device, config, traces):
    params = wide_params(config, device=str(device))
    step, cache, adapters = make(params, recorder_name, modes, traces)
    ones = {slot: random_adapter(adapters, slot, rank=RANK - slot) for slot in range(COUNT)}
    captured = set(step.replays)
    for slot, one in ones.items():
        step.load_slot(slot, adapters=one)
    for ids in ([2, -1, 0, 2], [1, 1, 1], [-1, 0], [0, 1, 2, -1]):
        for want, decode in zip(alone(params, ids, ones), (False, True)):
            got, _ = step(cache, batch_of(ids, decode=decode))
            torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)
    assert set(step.replays) == captured
    assert step.stats.share("NONE") == (modes == "NONE")


def test_a_batch_without_adapter_ids_is_told_what_it_lacks(params):
    batch = empty_batch(batch_type(), POLICY, fg.BatchSpec(1, 1))
    adapters = lora.slots(params, count=1, rank=2)
    with pytest.raises(
        TypeError, match=r'Batch has no adapter_ids.*fg\.buffer\("T", "int64", pad=-1'
    ):
        lora.adapted(forward)(params, adapters, cache_of(params), batch)


def test_a_row_without_an_adapter_is_bitwise_plain(params):
    """At the same size, that is: another number of rows may add up in another order."""
    empty = lora.slots(params, count=COUNT, rank=RANK, names=NAMES)
    one = random_adapter(empty, 0)
    adapters = tuple(
        {
            n: lora.LowRank(p.a.expand(COUNT, -1, -1), p.b.expand(COUNT, -1, -1))
            for n, p in x.items()
        }
        for x in one
    )
    got, _ = lora.adapted(forward)(params, adapters, cache_of(params), batch_of([-1, 0, -1]))
    plain, _ = forward(params, cache_of(params), batch_of([-1, -1, -1]))
    assert torch.equal(got[[0, 2]], plain[[0, 2]]) and not torch.equal(got[1], plain[1])


@pytest.mark.parametrize("half", ["a", "b"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_slot_that_is_not_finite_reaches_its_own_rows_alone(params, half, value):
    """In any layer, in any of its numbers."""
    empty = lora.slots(params, count=COUNT, rank=RANK, names=NAMES)
    for slot in range(COUNT):
        one = random_adapter(empty, slot)
        for own, new in zip(empty, one):
            for name, pair in own.items():
                pair.a[slot], pair.b[slot] = new[name].a, new[name].b
    good, _ = lora.adapted(forward)(params, empty, cache_of(params), batch_of([-1, 0, 1, 2]))
    getattr(empty[1]["mlp.w_gate"], half)[1, RANK - 1, 3] = value
    got, _ = lora.adapted(forward)(params, empty, cache_of(params), batch_of([-1, 0, 1, 2]))
    assert torch.equal(got[[0, 1, 3]], good[[0, 1, 3]]) and good.isfinite().all()
    assert got[2].isnan().all()


def test_what_overflows_for_others_is_not_theirs():
    """In float16 an adapter may be beyond it for rows that are not its own."""
    x = torch.tensor([[1.0, 1.0], [300.0, 300.0]], dtype=torch.float16)
    weight, gate = torch.eye(2, dtype=torch.float16), torch.tensor([[[True]], [[False]]])
    pair = lora.LowRank(torch.full((1, 1, 2), 300.0).half(), torch.ones(1, 1, 2).half())
    got = linear(x, lora.AdaptedWeight(weight, pair, gate))
    assert got.tolist() == [[601.0, 601.0], [300.0, 300.0]]


def test_loading_a_slot_captures_nothing_and_changes_its_rows_alone(params, traces):
    step, cache, adapters = make(params, "tape", "FULL_AND_PIECEWISE", traces, lazy=True)
    before, _ = step(cache, batch_of([0, 1, -1]))
    captures = step.stats.copy().captures
    step.load_slot(1, adapters=random_adapter(adapters, 9))
    after, _ = step(cache, batch_of([0, 1, -1]))
    assert step.stats.captures == captures
    changed = (before != after).any(-1).tolist()
    assert changed == [False, True, False]
    step.load_slot(1, adapters=lora.one_slot(adapters, {}))
    assert torch.equal(step(cache, batch_of([0, 1, -1]))[0], before)


@pytest.mark.parametrize(
    "counts, chosen",
    [(COUNT, {0: 0, 1: 1, 2: 2, 3: 4}), ((0, COUNT), {0: 0, 1: 3, 2: 3, 3: 3}),
     ((COUNT,), {0: None, 1: 3, 3: 3}), ((0, 2), {0: 0, 2: 2, 3: None})],
    ids=str,
)  # fmt: skip
def test_keys_by_the_number_of_adapters(counts, chosen, params, traces):
    """A count of its own, the next one that is captured, or none: eager, and it says so."""
    step, cache, _ = make(params, "tape", "FULL_AND_PIECEWISE", traces, counts, lazy=True)
    ids = {0: [-1, -1, -1], 1: [1, -1, 1], 2: [1, -1, 2], 3: [1, 0, 2]}
    for distinct, count in chosen.items():
        for decode in (False, True):
            batch = batch_of(ids[distinct], decode=decode)
            assert batch.spec.adapters == distinct
            mode, key, reason = step.dispatch(batch.spec)
            step(cache, batch)
            if count is None:
                assert mode is fg.Mode.NONE and "adapters" in reason
            else:
                assert mode is (fg.Mode.FULL if decode else fg.Mode.PIECEWISE)
                assert key.adapters == count
    assert step.stats.reasons.keys() == {
        r for r in step.stats.reasons if "no PIECEWISE key is for that many adapters" in r
    }


def test_batches_without_adapters_pay_nothing(params, traces):
    """Two functions over one cache and one pool: the plain one has no kernel more."""
    adapted, cache, adapters = make(params, "tape", "FULL", traces)
    adapted.load_slot(2, adapters=random_adapter(adapters, 2))
    fast = fg.graphify(
        forward, modes="FULL", donate="cache", stage="batch", sizes=(4, 16), recorder="tape"
    )
    plain = fast.bind(params).capture(
        cache, LIMITS, batch=batch_of([-1]), recorder=adapted.recorder, progress=False
    )
    step = lambda cache, batch: (adapted if batch.spec.adapters else plain)(cache, batch)  # noqa: E731
    wanted = alone(params, [2, -1, 2], {2: random_adapter(adapters, 2)})
    got = [step(cache, batch_of([2, -1, 2], decode=decode))[0] for decode in (False, True)]
    for g, want in zip(got, wanted):
        torch.testing.assert_close(g, want, atol=2e-4, rtol=1e-4)
    none, _ = step(cache, batch_of([-1, -1]))
    bare, _ = forward(params, cache_of(params), batch_of([-1, -1]))
    torch.testing.assert_close(none, bare, atol=2e-4, rtol=1e-4)
    assert (plain.stats.steps, adapted.stats.steps) == (1, 2)
    nodes = [s[s.dispatch(b.spec).descriptor].counts.nodes
             for s, b in ((plain, batch_of([-1, -1])), (adapted, batch_of([2, -1])))]  # fmt: skip
    assert nodes[1] - nodes[0] >= 4 * len(NAMES) * len(params.layers)


def test_what_does_not_fit_is_listed(params):
    adapters = lora.slots(params, count=2, rank=2)
    dim = params.config.dim
    pairs = {
        (0, "attn.wq"): (torch.zeros(3, dim), torch.zeros(3, 72)),  # rank 3
        (0, "mlp.w_up"): (torch.zeros(1, dim), torch.zeros(1, 48)),
        (7, "attn.wq"): (torch.zeros(1, dim), torch.zeros(1, 72)),
        (1, "attn.wo"): (torch.zeros(1, 72), torch.zeros(1, 33)),
    }
    with pytest.raises(ValueError) as error:
        lora.one_slot(adapters, pairs)
    for line in ("layers.0.attn.wq: rank 2 at most, 32 to 72", "layers.0.mlp.w_up: no slots",
                 "layers.7.attn.wq: no slots", "layers.1.attn.wo: rank 2 at most"):  # fmt: skip
        assert line in str(error.value)


def test_a_bias_goes_along():
    x, weight, bias = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5)
    pair = lora.LowRank(torch.randn(2, 1, 4), torch.randn(2, 1, 5))
    gate = torch.tensor([[1.0, 0], [0, 1], [0, 0]])[..., None]
    held = lora.AdaptedWeight(weight, pair, gate)
    updates = [x[i] @ pair.a[i].T @ pair.b[i] for i in range(2)]
    want = x @ weight.T + bias + torch.stack([*updates, torch.zeros(5)])
    for got in (linear(x, held, bias), linear(x, held, bias=bias)):
        torch.testing.assert_close(got, want)
    torch.testing.assert_close(linear(x, held, None), want - bias)


def test_an_adapted_weight_is_for_linear_alone(params):
    odd = lambda p, cache, batch: p.layers[0].attn.wq @ p.embed.T  # noqa: E731
    adapters = lora.slots(params, count=1, rank=1)
    with pytest.raises(TypeError, match=r"matmul.* linear\(x, weight\) alone"):
        lora.adapted(lambda p, c, b: torch.matmul(p.layers[0].attn.wq, p.embed.T))(
            params, adapters, None, batch_of([0])
        )
    with pytest.raises(TypeError):
        lora.adapted(odd)(params, adapters, None, batch_of([0]))


@pytest.mark.parametrize(
    "name",
    ["qwen2", "gemma3_text", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3", "qwen3_next"],
)
def test_every_family_with_attention_takes_adapters(name, tmp_path):
    """Their projections lie deeper than Llama's, and some layers have none."""
    tiny.save(name, tmp_path)
    family = loading.family(tmp_path)
    _, params = family.load(tmp_path)
    adapters = lora.slots(params, count=2, rank=RANK)
    one = random_adapter(adapters, 4)
    for own, new in zip(adapters, one):
        for path, pair in own.items():
            pair.a[1], pair.b[1] = new[path].a, new[path].b
    text = [3, 1, 4, 1, 5]
    batch = generate.alone(text, 0, 4, "cpu", family.Batch)
    merge = lambda own: lambda n, x: x + (own[n].a.T @ own[n].b).T if n in own else x  # noqa: E731
    layers = tuple(naming.replaced(layer, merge(own)) for layer, own in zip(params.layers, one))
    run = lambda forward, *held: forward(  # noqa: E731
        *held, family.init_cache(params.config, 4, num_slots=1), batch
    )[0]
    want = run(family.forward, dataclasses.replace(params, layers=layers))
    object.__setattr__(batch, "adapter_ids", torch.ones_like(batch.token_ids))
    got = run(lora.adapted(family.forward), params, adapters)
    torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-4)
    assert (got - run(family.forward, params)).abs().max() > 0.1
