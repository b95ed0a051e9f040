"""Draws from logits: by the exact probabilities, and the same in any batch, padding and mode."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import fngraph as fg
from fngraph.models import Settings
from fngraph.models.serving.sampling import FAILED, Sampling, key_of, sample, stack, uniform

V, DRAWS = 12, 20_000
FILTERS = [
    Settings(1.0),
    Settings(0.5),
    Settings(1.7),
    Settings(1.0, top_k=5),
    Settings(1.0, top_p=0.8),
    Settings(1.0, min_p=0.1),
    Settings(0.7, top_k=7, top_p=0.9),
    Settings(1.3, top_k=9, min_p=0.2),
    Settings(1.3, top_p=0.95, min_p=0.03),
    Settings(0.9, top_k=8, top_p=0.97, min_p=0.02),
]


def row(seed: int = 0, size: int = V) -> Tensor:
    """Logits of one row, some of them equal."""
    x = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 1.5
    return (x * 8).round() / 8


def probabilities(logits_V: Tensor, s: Settings) -> Tensor:
    """What each token's share of the draws should be, by the definition, token by token."""
    p = (logits_V.double() / s.temperature).softmax(-1).tolist()
    ranked = sorted(range(len(p)), key=lambda i: (-p[i], i))
    ranked = ranked[: s.top_k or len(p)]
    whole, kept, reached = sum(p[i] for i in ranked), [], 0.0
    for i in ranked:
        if reached >= s.top_p * whole or p[i] < s.min_p * p[ranked[0]] * (1 - 1e-7):
            break
        kept.append(i)
        reached += p[i]
    out = torch.zeros(len(p), dtype=torch.float64)
    out[kept] = torch.tensor([p[i] for i in kept], dtype=torch.float64) / reached
    return out


def p_value(counts: Tensor, expected: Tensor) -> float:
    """Of Pearson's chi-square; rare cells are one, and those that cannot be are checked."""
    assert counts[expected == 0].sum() == 0, "a token that is filtered out was drawn"
    rare = expected < 8
    counts, expected = (
        torch.cat([x[~rare].double(), x[rare].sum()[None].double()]) for x in (counts, expected)
    )
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum()
    if len(expected) == 1:
        return float(statistic < 1e-9)
    free = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(free, statistic / 2).item()


def draws(logits_V: Tensor, s: Settings, *, seeds: bool = False) -> Tensor:
    """DRAWS tokens: of one request at as many places, or of as many requests at one place."""
    count = torch.arange(DRAWS)
    settings = [s._replace(seed=i) for i in range(DRAWS)] if seeds else [s] * DRAWS
    places = torch.full((DRAWS,), 17) if seeds else count
    return sample(logits_V.expand(DRAWS, -1), stack(settings), places)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seeds", [False, True], ids=["places", "seeds"])
@pytest.mark.parametrize("s", FILTERS, ids=str)
def test_draws_have_the_exact_probabilities(s, seeds):
    counts = draws(row(), s, seeds=seeds).bincount(minlength=V)
    assert p_value(counts, probabilities(row(), s) * DRAWS) > 1e-3


def test_the_judge_sees_what_is_wrong():
    drawn = draws(row(), Settings(1.0, top_p=0.8)).bincount(minlength=V)
    other = probabilities(row(), Settings(0.93, top_p=0.8)) * DRAWS
    assert p_value(drawn, other) < 1e-6
    with pytest.raises(AssertionError, match="filtered out"):
        p_value(drawn, probabilities(row(), Settings(1.0, top_p=0.7)) * DRAWS)


@pytest.mark.parametrize("apart", [1, 2, 64])
def test_neighbouring_places_and_seeds_are_independent(apart):
    logits_V, s = row(size=4) / 2, Settings(1.0)
    p = probabilities(logits_V, s)
    for drawn in (draws(logits_V, s), draws(logits_V, s, seeds=True)):
        pairs = (drawn[:-apart] * 4 + drawn[apart:]).bincount(minlength=16)
        assert p_value(pairs, torch.outer(p, p).flatten() * (DRAWS - apart)) > 1e-3


def test_a_seed_and_a_place_do_not_stand_for_each_other():
    settings = stack([Settings(1.0, seed=i) for i in range(64)])
    logits_RV = row(size=4).expand(64, -1) / 4
    table = torch.stack([sample(logits_RV, settings, torch.full((64,), j)) for j in range(64)], 1)
    assert 0.2 < (table == table.T).double().mean() < 0.4  # 0.26 by chance, 1 if they did
    assert 0.2 < (table[:-1, 1:] == table[1:, :-1]).double().mean() < 0.4


def squares(counter: int, key: int) -> int:
    """The paper's four rounds on whole numbers."""
    whole = 2**64
    y = x = counter * key % whole
    z = (y + key) % whole
    for add in (y, z, y):
        x = (x * x + add) % whole
        x = (x >> 32 | x << 32) % whole
    return (x * x + z) % whole >> 32


def test_numbers_are_those_of_squares():
    keys = [key_of(seed) for seed in (0, 1, 2, -1, 10**30)]
    counters = [0, 1, 2, 1000, 2**31, 2**40 + 5]
    got = uniform(torch.tensor(keys)[:, None], torch.tensor(counters))
    want = [[squares(c, key % 2**64) / 2**32 for c in counters] for key in keys]
    assert got.dtype == torch.float64 and got.tolist() == want


def test_keys_are_odd_and_irregular():
    keys = [key_of(seed) for seed in range(-500, 500)]
    assert all(key % 2 and -(2**63) <= key < 2**63 for key in keys)
    assert len(set(keys)) == len(keys)
    assert all(14 <= (key % 2**64).bit_count() <= 50 for key in keys)


# the same token wherever the row stands ----------------------------------------------------------


BANK = torch.stack([row(seed, 1000) for seed in range(24)])
MIXED = [FILTERS[i % len(FILTERS)]._replace(seed=i) if i % 4 else Settings() for i in range(24)]


@fg.struct
class Rows:
    """Rows of a bank of logits, and the places of the tokens to draw."""

    rows: Tensor = fg.buffer("R", "int64", pad=0)
    places: Tensor = fg.buffer("R", "int64", pad=0)
    spec: fg.BatchSpec = fg.host()


@fg.struct
class Batch(Rows, Sampling):
    """With how they are drawn."""


def forward(bank: Tensor, batch: Batch) -> Tensor:
    """Tokens, (R,)."""
    return sample(bank[batch.rows], batch, batch.places)


def batch_of(rows: list[int]) -> Batch:
    """Row i draws the token at place 3i + 1, by MIXED[i]."""
    n = len(rows)
    index, leaves = torch.tensor(rows), vars(stack([MIXED[i] for i in rows]))
    return Batch(rows=index, places=3 * index + 1, spec=fg.BatchSpec(n, n, 1), **leaves)


def alone() -> list[int]:
    """Each row's token, in a batch of its own."""
    return [int(forward(BANK, batch_of([i]))) for i in range(24)]


ORDERS = [list(range(24)), list(range(23, -1, -1)), [5, 5, 5], [7], [0, 8, 16], [9, 3, 21, 11, 2]]


@pytest.mark.parametrize("modes", ["FULL", "PIECEWISE", "NONE"])
def test_the_same_in_any_batch_padding_and_mode(modes, recorder_name, device):
    bank = BANK.to(device)
    fast = fg.graphify(forward, stage="batch", modes=modes, sizes=(4, 32), recorder=recorder_name)
    step = fast.bind(bank).capture(fg.Limits(32, 32), progress=False)
    wanted = alone() if device.type == "cpu" else None
    for order in ORDERS:
        got = step(batch_of(order)).tolist()
        if wanted is None:
            wanted = got
        assert got == [wanted[i] for i in order]
    assert step.stats.share(modes) == 1
    assert len(set(wanted)) > 15


@pytest.mark.gpu
def test_the_same_in_any_batch_of_a_whole_vocabulary():
    """CUDA sorts one row, up to 127 and more of them in three different ways."""
    generator = torch.Generator("cuda").manual_seed(0)
    logits_RV = (torch.randn(256, 151_936, generator=generator, device="cuda") * 2).bfloat16()
    settings = stack([FILTERS[i % len(FILTERS)]._replace(seed=i) for i in range(256)])
    leaves = {name: x.cuda() for name, x in vars(settings).items()}
    places = torch.arange(256, device="cuda")

    def first(count: int, begin: int = 0) -> Tensor:
        rows = slice(begin, begin + count)
        part = Sampling(**{name: x[rows] for name, x in leaves.items()})
        return sample(logits_RV[rows], part, places[rows])

    wanted = torch.cat([first(1, i) for i in range(256)])
    assert wanted.unique().numel() > 200
    for count in (2, 64, 127, 128, 256):
        assert torch.equal(first(count), wanted[:count])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = first(count)
        graph.replay()
        assert torch.equal(got, wanted[:count])


def test_few_kernels(recorder_name, device):
    step = fg.graphify(forward, stage="batch", sizes=(4,), recorder=recorder_name)
    step = step.bind(BANK.to(device)).capture(fg.Limits(4, 4), progress=False)
    if recorder_name == "tape":  # a sort is one call there, some kernels on CUDA
        assert step[next(iter(step))].counts.nodes <= 56


def test_tokens_of_several_places_a_request():
    settings, rows = stack(MIXED[:6]), torch.arange(18).view(6, 3) % 24
    got = sample(BANK[rows], settings, rows * 2)
    assert got.shape == (6, 3)
    for q in range(3):
        assert torch.equal(got[:, q], sample(BANK[rows[:, q]], settings, rows[:, q] * 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_greedy_is_argmax_in_any_dtype(dtype):
    logits_RV = BANK.to(dtype)
    wanted = logits_RV.argmax(-1)
    settings = stack([Settings(0.0, top_k=3, top_p=0.1, min_p=0.5, seed=i) for i in range(24)])
    places = torch.arange(24)
    assert torch.equal(sample(logits_RV, settings, places), wanted)
    assert torch.equal(sample(logits_RV, settings, places, greedy=True), wanted)


@pytest.mark.parametrize(
    "s",
    [Settings(9.0, top_k=1), Settings(9.0, top_p=1e-6), Settings(9.0, min_p=1.0),
     Settings(1e-9), Settings(1e-4)],
    ids=str,
)  # fmt: skip
def test_one_token_is_left(s):
    distinct = torch.randperm(V, generator=torch.Generator().manual_seed(1)).float()
    assert draws(distinct, s).unique().tolist() == [int(distinct.argmax())]


def test_ties_go_to_the_lowest_id():
    flat = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.0, 1.0])
    for s in (Settings(), Settings(1.0, top_k=1), Settings(1.0, top_p=0.01)):
        assert draws(flat, s).unique().tolist() == [1]
    assert draws(flat, Settings(1.0, top_k=2)).unique().tolist() == [1, 2]
    assert draws(flat, Settings(1.0, min_p=1.0)).unique().tolist() == [1, 2, 3, 5]


def test_tokens_of_no_probability_are_never_drawn():
    logits_V = torch.full((V,), -math.inf)
    logits_V[[3, 8]] = torch.tensor([0.0, 1.0])
    for s in FILTERS:
        counts = draws(logits_V, s).bincount(minlength=V)
        assert p_value(counts, probabilities(logits_V, s) * DRAWS) > 1e-3
    logits_V[3] = -math.inf
    assert draws(logits_V, Settings(2.0)).unique().tolist() == [8]


def test_more_filters_than_tokens():
    assert draws(row(size=3), Settings(1.0, top_k=50)).unique().tolist() == [0, 1, 2]
    assert draws(row(size=1), Settings(1.0, top_k=2, top_p=0.5)).unique().tolist() == [0]


@pytest.mark.parametrize("heat", [1e-45, 1e-39, 1e-30, 9e-6])
def test_next_to_no_temperature_is_greedy(heat):
    """Logits over it would be infinite, and their differences NaN."""
    for logits_V in (row(), row() * 1e34):
        got = draws(logits_V, Settings(heat))
        assert got.unique().tolist() == [int(logits_V.argmax())]


def test_all_temperature_that_there_may_be_draws_evenly():
    logits_V = row().index_fill(0, torch.tensor([3]), -torch.inf)
    even = torch.ones(V, dtype=torch.float64).index_fill(0, torch.tensor([3]), 0) / (V - 1)
    assert p_value(draws(logits_V, Settings(1e38)).bincount(minlength=V), even * DRAWS) > 1e-3


@pytest.mark.parametrize(
    "bad",
    [{"temperature": -1.0}, {"temperature": math.nan}, {"temperature": math.inf},
     {"temperature": 3e38}, {"temperature": 1e39}, {"top_k": -1}, {"top_p": 0.0},
     {"top_p": 1.1}, {"min_p": 1.5}, {"top_k": 2.5}, {"top_k": 2**31}, {"seed": 1.5}],
    ids=str,
)  # fmt: skip
def test_a_setting_out_of_range_names_its_request(bad: dict[str, Any]):
    with pytest.raises(ValueError, match=r"request 1: Settings\("):
        stack([Settings(), Settings(**bad)])


NOTHING = {  # rows of which no token is the likeliest
    "NaN": [math.nan] * V, "-inf": [-math.inf] * V, "inf": [math.inf] * V,
    "one NaN": [0.0, math.nan, *[1.0] * (V - 2)], "one inf": [*[1.0] * (V - 1), math.inf],
    "NaN beside inf": [math.inf, math.nan, *[0.0] * (V - 2)],
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("what", NOTHING)
def test_a_row_that_says_nothing_is_said_and_harms_no_other(what: str, dtype: torch.dtype):
    """The same whether it is drawn or greedy, and in steps that are greedy throughout."""
    logits_RV = torch.stack([row(), torch.tensor(NOTHING[what]), row(1)]).to(dtype)
    places = torch.tensor([3, 4, 5])
    for s in [Settings(), *FILTERS]:
        got = sample(logits_RV, stack([s._replace(seed=i) for i in range(3)]), places)
        rest = sample(
            logits_RV[[0, 2]], stack([s._replace(seed=i) for i in (0, 2)]), places[[0, 2]]
        )
        assert got.tolist() == [rest[0], FAILED, rest[1]] and (rest >= 0).all()
    greedy = sample(logits_RV, stack([Settings()] * 3), places, greedy=True)
    assert greedy.tolist() == [row().argmax(), FAILED, row(1).argmax()]


def test_numbers_at_the_ends_of_float32_are_numbers():
    """Over a temperature they would leave it."""
    logits_V = torch.full((V,), -3e38)
    logits_V[[2, 7]] = torch.tensor([3e38, 2.9e38])
    for s in FILTERS:
        assert draws(logits_V, s._replace(temperature=1e-4)).unique().tolist() == [2]


def test_requests_without_a_seed_draw_apart():
    settings = stack([Settings(1.0)] * 64)
    drawn = sample(row().expand(64, -1), settings, torch.full((64,), 5))
    assert settings.keys.unique().numel() == 64 and drawn.unique().numel() > 3
