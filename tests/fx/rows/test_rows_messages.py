"""What a refusal says, and that the code in it does what it says."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import toys
from rows_given import INF, T_of, check, graphified, masked, output, params, real, rows, trace

import fngraph as fg
from fngraph.errors import RowsError

VALID = "valid = b.slot_mapping >= 0; torch.where(valid[:, None], x, "
DIVIDED = "torch.where(valid[:, None], x, 0).sum(0) / valid.sum()"


def places(b: Any) -> Any:
    """(T, 1, 2, 4) from 0 to 7; in padding from -1 on."""
    return b.slot_mapping.clamp(max=0)[:, None, None, None] + torch.arange(8).view(2, 4)


CASES: dict[str, tuple[Any, str, Any]] = {
    "sum": (
        lambda x, p, b: x.sum(0),
        "takes sum over T, and a key has rows of padding there. Mask them: " + VALID + "0)",
        lambda x, p, b: torch.where(real(b)[:, None], x, 0).sum(0),
    ),
    "mean": (
        lambda x, p, b: x.mean(0),
        DIVIDED,
        lambda x, p, b: torch.where(real(b)[:, None], x, 0).sum(0) / real(b).sum(),
    ),
    "softmax": (
        lambda x, p, b: x.softmax(0),
        VALID + "float('-inf'))",
        lambda x, p, b: torch.where(real(b)[:, None], x, float("-inf")).softmax(0),
    ),
    "amax of ints": (
        lambda x, p, b: b.token_ids.amax(0),
        "valid = b.slot_mapping >= 0; torch.where(valid, x, torch.iinfo(x.dtype).min)",
        lambda x, p, b: torch.where(real(b), b.token_ids, torch.iinfo(b.token_ids.dtype).min).amax(
            0
        ),
    ),
    "amin of ints": (
        lambda x, p, b: b.token_ids.amin(0),
        "torch.iinfo(x.dtype).max)",
        lambda x, p, b: torch.where(real(b), b.token_ids, torch.iinfo(b.token_ids.dtype).max).amin(
            0
        ),
    ),
    "cross entropy": (
        lambda x, p, b: F.cross_entropy(x, b.token_ids % 8),
        "valid = b.slot_mapping >= 0; target = torch.where(valid, target, -100)",
        lambda x, p, b: F.cross_entropy(x, torch.where(real(b), b.token_ids % 8, -100)),
    ),
    "count": (
        lambda x, p, b: x / T_of(b),
        (
            "computes with T, which in a key is the padded number of rows (div). Count the true "
            "ones: valid = b.slot_mapping >= 0; valid.sum()"
        ),
        lambda x, p, b: x / (b.slot_mapping >= 0).sum(),
    ),
    "last row": (
        lambda x, p, b: x[-1] * 1,
        (
            "takes rows counted from the end of T (select), where a key has padding. Take them by "
            "index, of a staged leaf: x[index]"
        ),
        lambda x, p, b: x[b.query_start_loc[1:] - 1],
    ),
    "negative index": (
        lambda x, p, b: x[torch.arange(T_of(b)) - 1],
        "or let them not be: index.clamp(min=0)",
        lambda x, p, b: x[(torch.arange(T_of(b)) - 1).clamp(min=0)],
    ),
    "negative pad": (
        lambda x, p, b: F.embedding(b.slot_mapping % 11 - (b.slot_mapping < 0).long() * 11, p["w"]),
        "torch.where(valid, index, 0), or index.clamp(min=0)",
        lambda x, p, b: F.embedding((b.slot_mapping % 11).clamp(min=0), p["w"]),
    ),
    "reshape": (
        lambda x, p, b: x.t().reshape(-1),
        "which puts padding between the true rows. Keep T or R outermost: movedim it to the front",
        lambda x, p, b: x.t().movedim(-1, 0).reshape(-1),
    ),
    "convolution": (
        lambda x, p, b: F.conv1d(x.t()[None], x.new_ones(1, 8, 3), padding=1)[0].t(),
        "Pad in front alone: F.pad(x, (kernel - 1, 0)), with padding=0",
        lambda x, p, b: F.conv1d(F.pad(x.t()[None], (3 - 1, 0)), x.new_ones(1, 8, 3))[0].t(),
    ),
    "searched beyond the last": (
        lambda x, p, b: torch.searchsorted(b.query_start_loc, b.seq_lens),
        "Search for torch.arange(T), the tokens' own rows",
        lambda x, p, b: torch.searchsorted(b.query_start_loc, torch.arange(T_of(b)), right=True),
    ),
    "unknown": (
        lambda x, p, b: torch.take(x, torch.arange(8)),
        (
            "of which it is not known whether it keeps rows apart. If row i of its result depends "
            "on row i alone, say so, of it or of a call around it: fg.trust_rows(result)"
        ),
        lambda x, p, b: fg.trust_rows(torch.take(x, torch.arange(8))),
    ),
    "within a call": (
        lambda x, p, b: x.quantile(0.5, 1),
        "say of a call around it that it looks up nothing else: fg.trust_rows(result)",
        lambda x, p, b: fg.trust_rows(x.quantile(0.5, 1)),
    ),
    "distances": (
        lambda x, p, b: torch.cdist(x, p["w"]),
        'torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")',
        lambda x, p, b: torch.cdist(x, p["w"], compute_mode="donot_use_mm_for_euclid_dist"),
    ),
    "numbers that are not finite": (
        lambda x, p, b: torch.linalg.svdvals((1 / x).view(-1, 2, 4)),
        "; or valid = b.slot_mapping >= 0; torch.where(valid[:, None, None], x, 0)",
        lambda x, p, b: torch.linalg.svdvals((1 / x).nan_to_num().view(-1, 2, 4)),
    ),
    "pooled over tokens": (
        lambda x, p, b: F.max_pool2d(x.t().reshape(2, 4, -1), 1),
        "Let T and R be other dims, in front: x.movedim(-1, 0)",
        lambda x, p, b: F.max_pool2d(x.view(-1, 2, 4), 1),
    ),
    "chances": (
        lambda x, p, b: F.binary_cross_entropy(x, x, reduction="none"),
        "Use F.binary_cross_entropy_with_logits, or let both be some there",
        lambda x, p, b: F.binary_cross_entropy(
            *[torch.where(real(b)[:, None], x.sigmoid(), 0.5)] * 2, reduction="none"
        ),
    ),
    "a loss of all": (
        lambda x, p, b: F.mse_loss(x, x + 1),
        "torch.where(valid[:, None], loss, 0).sum() / (valid.sum() * n)",
        lambda x, p, b: (
            torch.where(real(b)[:, None], F.mse_loss(x, x + 1, reduction="none"), 0).sum()
            / (real(b).sum() * 8)
        ),
    ),
    "elements in their order": (
        lambda x, p, b: x.masked_scatter(x > 0, p["w"]),
        "be false there: valid = b.slot_mapping >= 0; torch.where(valid[:, None], mask, False)",
        lambda x, p, b: x.masked_scatter((x > 99) & real(b)[:, None], p["w"]),
    ),
    "unpooled": (
        lambda x, p, b: F.max_unpool2d(x.view(-1, 1, 2, 4), places(b), 2),
        "Let it be: index.clamp(0, 31)",
        lambda x, p, b: F.max_unpool2d(x.view(-1, 1, 2, 4), places(b).clamp(0, 31), 2),
    ),
    "shorter in a key": (
        lambda x, p, b: torch.ones(16 - T_of(b)),
        "makes a tensor of 16 - T rows (ones), which in a key may be fewer than its batch has",
        lambda x, p, b: torch.arange(16) < 16 - real(b).sum(),
    ),
    "joined behind": (
        lambda x, p, b: torch.cat([x, x.new_ones(2, 8)]),
        "joins rows behind T rows (cat), which end in padding. Put the parts of fixed size first",
        lambda x, p, b: torch.cat([x.new_ones(2, 8), x]),
    ),
    "attention": (
        lambda x, p, b: F.scaled_dot_product_attention(*[x[None, None]] * 3)[0, 0],
        "Mask them",
        lambda x, p, b: (x @ x.t()).masked_fill(~real(b), -INF).softmax(-1) @ masked(p, b),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_fix_in_the_message_works(name: str) -> None:
    """The text is there word for word, and its code is accepted and right."""
    refused, says, fixed = CASES[name]
    with pytest.raises(RowsError) as caught:
        trace(output(refused))
    assert says in str(caught.value)
    check(output(fixed))


RANKS: dict[str, Any] = {
    "1": lambda x: x[:, 0],
    "2": lambda x: x,
    "3": lambda x: x.view(-1, 2, 4),
    "4, by another dim": lambda x: x.view(-1, 2, 2, 2).movedim(0, 1),
}
OVER: dict[str, Any] = {
    "sum": lambda x, d: x.sum(d),
    "sum of all": lambda x, d: x.sum(),
    "max": lambda x, d: x.amax(d),
    "argmax": lambda x, d: x.argmax(d),
    "softmax": lambda x, d: x.softmax(d),
    "mean": lambda x, d: x.mean(d),
    "mean of all": lambda x, d: x.mean(),
}


@pytest.mark.parametrize("op", OVER)
@pytest.mark.parametrize("rank", RANKS)
def test_the_fix_works_as_it_is_written_for_a_tensor_of_any_rank(rank: str, op: str) -> None:
    """It is run: a mask that is broadcast to another shape would be accepted, and wrong."""
    shaped, over, d = RANKS[rank], OVER[op], int("other" in rank)
    with pytest.raises(RowsError) as caught:
        trace(output(lambda x, p, b: over(shaped(x), d)))
    fix = str(caught.value).partition("; ")[2].partition(". It reaches")[0]
    assert fix.startswith("torch.where(valid")
    fix = fix.replace("<elements of a row>", str(shaped(torch.zeros(1, 8)).numel()))

    def fixed(x: Any, p: Any, b: Any) -> Any:
        x = shaped(x)
        made = eval(fix, {"torch": torch, "x": x, "valid": real(b)})
        return made if "mean" in op else over(made, d)

    check(output(fixed))
    p, b = params(), toys.batch(3)
    x = rows(p, b)
    torch.testing.assert_close(fixed(x, p, b), over(shaped(x), d))


def test_the_fix_for_writes_works() -> None:
    """A row for padding, the last one, which the output leaves off."""

    def value(index: Any) -> Any:
        def forward(p: Any, s: Any, b: Any) -> Any:
            counts = torch.zeros(12, dtype=torch.int64)
            return counts.index_put((index(b, counts),), torch.ones_like(b.token_ids))[:11] * 1, s

        return forward

    with pytest.raises(RowsError) as caught:
        trace(value(lambda b, x: b.token_ids))
    assert "names no row kept for padding" in str(caught.value)
    assert "valid = b.slot_mapping >= 0; torch.where(valid, index, last)" in str(caught.value)
    check(value(lambda b, x: torch.where(b.slot_mapping >= 0, b.token_ids, len(x) - 1)))


def nowhere(b: Any) -> Any:
    """An index into 11 rows that padding names none of."""
    return b.token_ids - 20 * (b.slot_mapping < 0).long()


FAILING: dict[str, tuple[Any, str]] = {
    "an index that is asked for its shape": (
        lambda x, p, b: torch.zeros_like(p["w"][nowhere(b)]), "looks up what the padding"),
    "a write into what nobody reads": (
        lambda x, p, b: (p["w"].clone().index_put_((nowhere(b),), x), x)[1] * 1,
        "looks up what the padding"),
    "a division that is asked for its shape": (
        lambda x, p, b: torch.ones_like(b.token_ids // (b.slot_mapping + 1)),
        "divides integers by what may be 0 in padding"),
    "repeats that do not add up": (
        lambda x, p, b: torch.zeros_like(
            torch.repeat_interleave(b.seq_lens, output_size=T_of(b))), "computes with T"),
    "an index out of mixed rows": (
        lambda x, p, b: torch.zeros_like(p["w"][nowhere(b).flip(0)]), "looks up what"),
    "rows put where a mask is true": (
        lambda x, p, b: (x.clone().index_put_((real(b),), x), x)[1] * 1, "puts rows where a mask"),
    "chances of rows that are drawn": (
        lambda x, p, b: (torch.multinomial(b.slot_mapping[:, None] + 1.0, 1), x)[1] * 1,
        "draws by chances of which padding may hold what is none"),
    "chances that padding is in": (
        lambda x, p, b: (torch.multinomial((x.T @ x).softmax(-1), 1), x)[1] * 1,
        "gives multinomial what may be an error to it in padding"),
    "chances among rows": (
        lambda x, p, b: (torch.multinomial(b.slot_mapping + 0.5, 1), x)[1] * 1,
        "draws out of the padded number of rows"),
    "chances among rows that padding is in": (
        lambda x, p, b: (torch.multinomial(x.sum(1).softmax(0).round(), 1), x)[1] * 1,
        "draws out of the padded number of rows"),
    "an index that padding is in": (
        lambda x, p, b: torch.zeros_like(p["w"][b.slot_mapping.argmin()[None]]),
        "gives index what may be an error to it in padding"),
    "a divisor that padding is in": (
        lambda x, p, b: torch.ones_like(b.token_ids // b.slot_mapping.sum()),
        "gives floor_divide what may be an error to it in padding"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAILING)
def test_what_fails_in_padding_is_refused_whoever_reads_it(name: str) -> None:
    """For it runs all the same."""
    fn, says = FAILING[name]
    report = fg.check(
        output(fn), params(), toys.tally_state(), toys.batch(3, 2), donate=1, stage=2,
        limits=toys.LIMITS, generators=(torch.default_generator,), rehearse=True,
    )  # fmt: skip
    (error,) = report.errors
    assert isinstance(error, RowsError) and "test_rows_messages.py:" in str(error)
    assert says in str(error) and "No output is made of it, but it runs" in str(error)


@pytest.mark.parametrize("op", [operator.mul, operator.truediv, operator.floordiv, torch.fmod])
@pytest.mark.parametrize(
    "number", [lambda n: n, lambda n: n > 0, lambda n: n * 1.5], ids=["int", "bool", "float"]
)
def test_numbers_made_of_mixed_sizes_are_refused(op: Any, number: Any) -> None:
    """Whatever an op does with one: numbers of sizes have no dtype."""

    def fn(x: Any, p: Any, b: Any) -> Any:
        rows = torch.cat([x, x])
        return op(rows, number(rows.shape[0]))

    with pytest.raises(RowsError):
        check(output(fn))


def test_what_nobody_reads_is_no_part_of_a_graph() -> None:
    """What mixes padding. What may fail stays for its error, and is refused if padding does."""
    check(output(lambda x, p, b: (x.flip(0), x * 1)[1]))
    with pytest.raises(RowsError, match="No output is made of it, but it runs"):
        check(output(lambda x, p, b: (p["w"][nowhere(b)], x * 1)[1]))


def test_a_refusal_names_no_symbol_of_torchs() -> None:
    """Sizes are T and R, as in the batch's declaration."""
    for fn in (lambda x, p, b: x.sum(0), lambda x, p, b: x.t().reshape(-1)):
        with pytest.raises(RowsError) as caught:
            graphified(output(fn))(params(), toys.tally_state(), toys.batch(3, 2))
        assert "s4" not in str(caught.value) and "Sym" not in str(caught.value)
