"""Real rows and donated elements are bitwise the same whatever padding and dead memory hold.

Padding rows take token 0, read block 0 and write nowhere, so real batches use neither: the
embedding of token 0 and all blocks that nobody owns are free to hold poison. Dead intermediates
are poisoned by a step of the largest key over poisoned weights, whose memory the next step takes.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
import toys
from torch import Tensor

import fngraph as fg
from fngraph.models.families import llama

B, BLOCKS, S, MAX_T, MAX_R = 3, 16, 4, 16, 4
LIMITS = fg.Limits(MAX_T, MAX_R, B=B)
SIZES = (1, 2, 4, 8, 16)
POISONS = ("nan", "large", "valid", "duplicated")
MODES = ("FULL", "PIECEWISE", "FULL_AND_PIECEWISE")
CONFIG = llama.Config(
    vocab_size=toys.V, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, dim=16, mlp_dim=24
)


def head_rows(params: Any, cache: Any, batch: llama.Batch) -> Any:
    """`toys.attend`: logits of every token."""
    return toys.attend(params, cache, batch)


class Model(NamedTuple):
    """A forward with attention over a donated cache."""

    forward: Any
    params: Any
    cache: Any
    embed: Tensor


def model(name: str, device: Any) -> Model:
    """The toy, or the Llama at a tiny size; no element of a cache is like another."""
    if name == "toy":
        params = toys.attention_params(device=device)
        forward, embed = head_rows, params["embed"]
        cache = toys.attention_cache(blocks=BLOCKS)
    else:
        params = llama.init_params(CONFIG, device=device, seed=1)
        for x in toys.leaves(params):
            x.mul_(5)
        forward, embed = llama.forward, params.embed
        cache = llama.init_cache(CONFIG, BLOCKS, block_size=S)
    generator = torch.Generator().manual_seed(5)
    draw = lambda x: torch.randn(x.shape, generator=generator).to(device)  # noqa: E731
    return Model(forward, params, toys.trees.map_leaves(draw, cache), embed)


def batch(rows: list[tuple[int, int]], query_len: int | None, first: int, tail: int) -> llama.Batch:
    """Requests of `(new tokens, tokens before)`; each owns B blocks, from `first` on.

    Args:
        tail: what block tables hold beyond the blocks that a request has come to use.
    """
    generator = torch.Generator().manual_seed(len(rows))
    counts = [n for n, _ in rows]
    starts = torch.tensor([0, *counts]).cumsum(0)
    positions = torch.cat([torch.arange(past, past + n) for n, past in rows])
    tables = first + torch.arange(len(rows) * B).view(-1, B)
    owner = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(counts))
    slots = tables[owner, positions // S] * S + positions % S
    for row, (n, past) in zip(tables, rows):
        row[(n + past + S - 1) // S :] = tail
    return llama.Batch(
        token_ids=torch.randint(1, toys.V, (sum(counts),), generator=generator),
        positions=positions,
        slot_mapping=slots,
        seq_lens=torch.tensor([n + past for n, past in rows], dtype=torch.int32),
        query_start_loc=starts.int(),
        block_tables=tables.int(),
        logits_indices=starts[1:] - 1,
        spec=fg.BatchSpec(sum(counts), len(rows), query_len=query_len),
    )


def batch_for(mode: fg.Mode, key: Any, step: Any, tail: int) -> llama.Batch:
    """The least batch that this key serves, so that as much of it as can be is padding."""
    alike = [d for m, d in step.table if m is mode and d.query_len == key.query_len]
    T = max((d.num_tokens for d in alike if d.num_tokens < key.num_tokens), default=0) + 1
    R = T if key.query_len else min(2, T)
    rows = [(T // R + (r < T % R), 2 + 3 * r) for r in range(R)]
    rows = [(n, min(past, B * S - n)) for n, past in rows]
    return batch(rows, key.query_len, 1, tail)


def padded(given: llama.Batch, key: Any) -> llama.Batch:
    """The batch as the key's graph is to see it, by the pad rules on its fields."""
    T, R = given.spec.num_tokens, given.spec.num_reqs
    top_T = key.num_tokens
    top_R = min(top_T, MAX_R) if key.num_reqs is None else key.num_reqs
    more = lambda x, top, pad: torch.cat([x, x.new_full((top - len(x), *x.shape[1:]), pad)])  # noqa: E731
    starts = [*given.query_start_loc.tolist()]
    starts += [T + (key.query_len or 0) * i for i in range(1, top_R - R + 1)]
    return llama.Batch(
        token_ids=more(given.token_ids, top_T, 0),
        positions=more(given.positions, top_T, 0),
        slot_mapping=more(given.slot_mapping, top_T, -1),
        seq_lens=more(given.seq_lens, top_R, 0),
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        block_tables=more(given.block_tables, top_R, 0),
        logits_indices=more(given.logits_indices, top_R, 0),
        spec=fg.BatchSpec(top_T, top_R),
    )


def on(given: llama.Batch, device: Any) -> llama.Batch:
    moved = {name: getattr(given, name).to(device) for name in fg.core.buffers_of(llama.Batch)}
    return dataclasses.replace(given, **moved)


def bits(x: Tensor) -> Tensor:
    """As ints, so that a NaN equals itself and 0.0 is not -0.0."""
    return x.contiguous().view(torch.int32)


def equal_bits(a: Any, b: Any) -> bool:
    return all(torch.equal(bits(x), bits(y)) for x, y in zip(toys.leaves(a), toys.leaves(b)))


def poison(what: str, m: Model, owned: list[int], clean: Any) -> None:
    """Clean values in the blocks that are owned, poison in all else that padding may read."""
    others = [i for i in range(BLOCKS) if i not in owned]
    generator = torch.Generator().manual_seed(9)
    for x, kept in zip(toys.leaves(m.cache), toys.leaves(clean)):
        x.copy_(kept)
        if what == "valid":
            x[others] = torch.randn(x[others].shape, generator=generator).to(x.device)
        elif what == "duplicated":
            x[others] = x[owned[:1]].expand(len(others), *x.shape[1:])
        else:
            x[others] = {"nan": torch.nan, "large": 1e30}[what]
    row = {"nan": torch.nan, "large": 1e30, "valid": 0.25, "duplicated": m.embed[3]}[what]
    m.embed[0] = row


def dirty(step: Any, m: Model, what: str, device: Any) -> None:
    """Steps of the largest keys of each mode, whose dead intermediates and outputs are poison.

    They leave rows behind in the static buffers too, beyond those of the next batch.
    """
    values = {"nan": torch.nan, "large": 1e30, "valid": 1.5, "duplicated": 0.0}
    clean = m.embed.clone()
    m.embed.fill_(values[what])
    mixed = batch([(4, 0)] * MAX_R, None, 1, tail=2)
    step(m.cache, on(mixed, device))
    step(m.cache, on(batch([(1, 0)] * MAX_R, 1, 1, tail=2), device))
    m.embed.copy_(clean)


def check(step: Any, m: Model, mode: fg.Mode, key: Any, poisons: tuple[str, ...]) -> None:
    """A step of this key under each poison: against eager, against the cache before, and alike."""
    clean, embed, device, alike = toys.clone(m.cache), m.embed.clone(), m.embed.device, []
    for what in poisons:
        where = f"{what}: {mode} {key}"
        given = batch_for(mode, key, step, tail=1 if what == "duplicated" else 0)
        like = on(padded(given, key), device)
        assert step.dispatch(given.spec)[:2] == (mode, key)
        T, R = given.spec.num_tokens, given.spec.num_reqs
        owned, given = [*range(1, 1 + R * B)], on(given, device)
        dirty(step, m, what, device)
        poison(what, m, owned, clean)
        before = toys.clone(m.cache)
        eager, after_eager = toys.bare(m.forward, m.params, before, like)
        bare, after = toys.bare(m.forward, m.params, before, given)

        got, cache = step(m.cache, given)
        got = got.as_subclass(Tensor)
        rows = R if m.forward is llama.forward else T
        assert cache is m.cache and len(got) == rows and got.isfinite().all(), where
        assert equal_bits(got, eager[:rows]), where
        assert equal_bits(cache, after_eager), where
        torch.testing.assert_close(got, bare, atol=1e-4, rtol=1e-4, msg=where)
        slots = given.slot_mapping
        for x, old, new in zip(*(toys.leaves(t) for t in (cache, before, after))):
            x_N, old_N, new_N = (t.flatten(0, 1) for t in (x, old, new))
            torch.testing.assert_close(x_N[slots], new_N[slots], atol=1e-4, rtol=1e-4, msg=where)
            assert (x_N[slots] != old_N[slots]).any(), where  # they were written
            undeclared = torch.ones(len(x_N), dtype=torch.bool, device=device)
            undeclared[slots] = False
            assert equal_bits(x_N[undeclared], old_N[undeclared]), where
        alike.append((got.clone(), [x[owned].clone() for x in toys.leaves(cache)]))
        m.embed.copy_(embed)
        for x, kept in zip(toys.leaves(m.cache), toys.leaves(clean)):
            x.copy_(kept)
    for what, other in zip(poisons[1:], alike[1:]):
        assert equal_bits(alike[0], other), f"{poisons[0]} and {what} differ: {mode} {key}"


def capture(m: Model, recorder_name: str, modes: str, **options: Any) -> Any:
    """The step, every key captured; attention that gives a row the same bits in any batch."""
    fast = fg.graphify(
        m.forward, modes=modes, donate="cache", stage="batch", sizes=SIZES, recorder=recorder_name,
        backends={"attention": "triton" if recorder_name == "cuda" else "reference"},
    )  # fmt: skip
    return fast.bind(m.params).capture(m.cache, LIMITS, progress=False, **options)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("guards", [False, True], ids=["", "guards"])
@pytest.mark.parametrize("modes", MODES)
def test_no_poison_reaches_what_is_real(recorder_name, device, modes: str, guards: bool):
    check_all("toy", recorder_name, device, modes, guards)


@pytest.mark.gpu
@pytest.mark.parametrize("guards", [False, True], ids=["", "guards"])
@pytest.mark.parametrize("modes", MODES)
def test_no_poison_reaches_what_is_real_in_a_llama(modes: str, guards: bool):
    check_all("llama", "cuda", torch.device("cuda", 0), modes, guards)


def test_no_poison_reaches_what_is_real_in_a_llama_on_the_tape():
    check_all("llama", "tape", torch.device("cpu"), "FULL_AND_PIECEWISE", True)


def check_all(name: str, recorder_name: str, device: Any, modes: str, guards: bool) -> None:
    """Every key of a model."""
    m = model(name, device)
    step = capture(m, recorder_name, modes, guards=guards)
    keys = list(step.replays)
    assert len(keys) == len(step.table) >= 5
    for mode, key in keys:
        check(step, m, mode, key, POISONS)


def leak_rows(params: Any, cache: Any, batch: llama.Batch) -> Any:
    """Says that it keeps its rows apart, and lets a little of padding into each of them."""
    x, cache = toys.attend(params, cache, batch)
    return x + fg.trust_rows(params["embed"][batch.token_ids].mean() * 1e-5), cache


def leak_block(params: Any, cache: Any, batch: llama.Batch) -> Any:
    """Lets a little of block 0 in, which no request owns."""
    x, cache = toys.attend(params, cache, batch)
    return x + cache[0][0][0, 0, 0, 0] * 1e-5, cache


@pytest.mark.sampled(2)
@pytest.mark.parametrize("what", ["nan", "large", "valid"])
@pytest.mark.parametrize("leak", [leak_rows, leak_block])
def test_a_leak_is_seen(recorder_name, device, leak: Any, what: str):
    m = model("toy", device)._replace(forward=leak)
    step = capture(m, recorder_name, "FULL")
    key = step.dispatch(fg.BatchSpec(9, 2)).descriptor
    with pytest.raises(AssertionError):
        check(step, m, fg.Mode.FULL, key, ("duplicated", what))
