"""`fngraph.core.sizes`: the default ladder, checked ladders, aligned ladders."""

import pytest

from fngraph.core import Ladders, Limits, check_sizes, default_sizes, ladders
from fngraph.errors import SizesError

TO_256 = (1, 2, 4, *range(8, 257, 8))


def test_the_default_ladder_has_51_sizes():
    sizes = default_sizes(Limits())
    assert sizes == (*TO_256, *range(272, 513, 16))
    assert len(sizes) == 51


@pytest.mark.parametrize(
    ("limits", "options", "sizes"),
    [
        (Limits(8192, 1), {}, (1, 2)),
        (Limits(8192, 3), {}, (1, 2, 3, 4)),
        (Limits(8192, 17), {}, (1, 2, 4, 8, 16, 17, 24, 32)),  # 17: no cliff at max_reqs
        (Limits(20, 256), {}, (1, 2, 4, 8, 16, 20)),  # 20: no cliff at max_tokens
        (Limits(64, 512), {}, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)),
        (Limits(8192, 4), {"query_lens": (3,)}, (1, 2, 3, 4, 6, 8, 12, 16, 24)),
        (Limits(8192, 3), {"query_lens": (1, 3)}, (1, 2, 3, 4, 6, 8, 9, 16)),
        (Limits(8192, 256), {"ceiling": 9}, (1, 2, 4, 8)),
        (Limits(8192, 256), {"top": 17}, (1, 2, 4, 8, 16)),
        (Limits(8192, 2), {"top": 33}, (1, 2, 4, 8, 16, 24, 32)),  # beyond twice max_reqs
        (Limits(8192, 3), {"top": 9, "query_lens": (3,)}, (1, 2, 4, 8)),
        (Limits(8, 256), {"top": 17}, (1, 2, 4, 8)),
        (Limits(8192, 6), {"dense": True}, tuple(range(1, 13))),
        (Limits(8192, 20), {"dense": True}, (*range(1, 33), 40)),
        (Limits(1, 1), {}, (1,)),
    ],
)
def test_default_sizes(limits, options, sizes):
    assert default_sizes(limits, **options) == sizes


def test_more_than_256_requests_and_a_higher_ceiling():
    sizes = default_sizes(Limits(8192, 300), ceiling=1024)
    assert sizes == tuple(sorted({*TO_256, *range(272, 601, 16), 300}))
    mixed, uniform = {*TO_256, *range(272, 1085, 16)}, {2 * size for size in TO_256}
    sizes = default_sizes(Limits(8192, 271), (2,), ceiling=9999)
    assert sizes == tuple(sorted(mixed | uniform | {2 * 271}))
    sizes = default_sizes(Limits(8192, 288), (2,), ceiling=9999)
    mixed = {*TO_256, *range(272, 1153, 16)}
    assert sizes == tuple(sorted(mixed | uniform | {2 * 272, 2 * 288}))


def test_the_ceiling_is_512():
    assert default_sizes(Limits(513, 1000))[-1] == 512
    assert default_sizes(Limits(8192, 1000), (3,))[-1] == 512


def test_every_decode_batch_at_max_reqs_has_its_own_rung():
    for max_reqs in range(1, 130):
        for query_len in (1, 2, 3, 4):
            sizes = default_sizes(Limits(8192, max_reqs), (query_len,))
            assert max_reqs * query_len in sizes or max_reqs * query_len > 512
            assert (
                ladders(sizes, (query_len,), max_reqs).uniform[query_len][-1]
                == min(max_reqs, sizes[-1] // query_len) * query_len
            )


@pytest.mark.parametrize("query_lens", [(), (1, 1), (0,), (-1, 2)])
def test_query_lens_are_distinct_and_positive(query_lens):
    with pytest.raises(SizesError) as info:
        default_sizes(Limits(), query_lens)
    assert str(info.value) == (
        f"query_lens={query_lens} must be distinct and positive. "
        "Pass query_lens=(1,) for plain decoding, (1, 4) with up to 3 drafted tokens."
    )
    if query_lens:
        with pytest.raises(SizesError):
            ladders([8], query_lens)


def test_a_top_below_one_leaves_nothing():
    with pytest.raises(SizesError, match=r"top=0 leaves no size at all\. Pass top=1 or more"):
        default_sizes(Limits(), top=0)


def test_a_ceiling_of_a_model_in_which_no_graph_pays_leaves_nothing():
    """`LaunchModel.ceiling()` is 0 there."""
    with pytest.raises(SizesError, match=r'ceiling=0 leaves no .* Pass modes="NONE"'):
        default_sizes(Limits(), ceiling=0)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((), "The ladder is empty. Pass sizes=default_sizes(limits)."),
        ((1, 0), "Size 0 is not a positive integer. Drop it from the ladder."),
        ((1.0,), "Size 1.0 is not a positive integer. Drop it from the ladder."),
        ((1, 4, 2), "The ladder is not ascending: 2 comes after 4. Pass sizes=(1, 2, 4)."),
        ((1, 2, 2), "The ladder repeats 2. Pass sizes=(1, 2)."),
        (
            (1, 65),
            (
                "Size 65 is beyond Limits(max_tokens=64): no step will ever need it. "
                "Drop it, or pass Limits(max_tokens=65)."
            ),
        ),
    ],
)
def test_bad_ladders(sizes, message):
    with pytest.raises(SizesError) as info:
        check_sizes(sizes, Limits(64, 8))
    assert str(info.value) == message
    if sizes != (1, 65):
        with pytest.raises(SizesError):
            ladders(sizes)


def test_good_ladders_come_back_as_tuples():
    assert check_sizes([1, 2, 64], Limits(64, 8)) == (1, 2, 64)
    assert check_sizes(iter([70])) == (70,)


@pytest.mark.parametrize(
    ("sizes", "query_lens", "max_reqs", "align", "mixed", "uniform"),
    [
        ((1, 8, 16), (1,), 256, "uniform", (1, 8, 16), {1: (1, 8, 16)}),
        ((1, 8, 16), (3,), 256, "uniform", (1, 8, 16), {3: (3, 9, 15)}),
        ((1, 8, 16), (1, 3), 4, "uniform", (1, 8, 16), {1: (1, 4), 3: (3, 9, 12)}),
        ((1, 2, 4, 8, 16, 24), (3,), 8, "all", (3, 6, 9, 18, 24), {3: (3, 6, 9, 18, 24)}),
        ((1, 8), (2, 3), 8, "all", (2, 3, 6, 8), {2: (2, 6, 8), 3: (3, 6)}),
        ((1, 8), (2, 3), 1, "all", (2, 3, 6, 8), {2: (2,), 3: (3,)}),
        ((4,), (3,), 8, "all", (3,), {3: (3,)}),
        ((1, 8, 16), (3,), 8, "all", (3, 9, 15), {3: (3, 9, 15)}),
        ((4,), (4, 5), 8, "all", (4,), {4: (4,), 5: ()}),
        ((2,), (3,), 8, "uniform", (2,), {3: ()}),
        ((1, 2), (), 8, "all", (1, 2), {}),
        ((1, 2), (), 8, "uniform", (1, 2), {}),
        ((10,), (1,), 3, "uniform", (10,), {1: (3,)}),
    ],
)
def test_aligned(sizes, query_lens, max_reqs, align, mixed, uniform):
    steps = ladders(sizes, query_lens, max_reqs, align)
    assert (steps.mixed, steps.uniform) == (mixed, uniform)


@pytest.mark.parametrize(
    ("sizes", "query_len", "max_reqs", "align", "uniform"),
    [
        ((1, 8, 16), 3, 256, "uniform", (3, 9)),
        ((10,), 1, 3, "uniform", ()),
        ((1, 2, 4, 8, 16, 24), 3, 5, "all", (3, 6, 9)),
        ((1, 8, 16), 3, 256, "all", (3, 9)),
    ],
)
def test_beyond_dropped(sizes, query_len, max_reqs, align, uniform):
    steps = ladders(sizes, (query_len,), max_reqs, align, beyond="drop")
    assert steps.uniform == {query_len: uniform}


def test_the_query_length_itself_is_the_last_resort():
    assert ladders([4], (3,), align="all", beyond="drop") == Ladders((3,), ((3, (3,)),))


def test_nothing_to_round_and_unknown_words():
    with pytest.raises(SizesError) as info:
        ladders([2], (5, 3), align="all")
    assert str(info.value) == (
        "No size up to 2 is a multiple of query_len=3. Pass a ladder that reaches 3."
    )
    with pytest.raises(SizesError) as info:
        ladders([2], align="none")
    assert str(info.value) == ('align=\'none\' is unknown. Pass align="uniform" or align="all".')
    with pytest.raises(SizesError) as info:
        ladders([2], beyond="keep")
    assert str(info.value) == ('beyond=\'keep\' is unknown. Pass beyond="cut" or beyond="drop".')


def test_ladders_are_values():
    steps = ladders([1, 8], (1,))
    assert steps == Ladders((1, 8), ((1, (1, 8)),)) and hash(steps)
    steps.uniform[1] = ()
    assert steps.uniform == {1: (1, 8)}
    assert Ladders() == Ladders((), ())
