"""`fngraph.core.resolution`: which modes remain of what was asked, the whole table, and why."""

from itertools import product

import pytest

from fngraph.core import (
    Ladders,
    Limits,
    Mode,
    Resolution,
    Support,
    default_sizes,
    ladders,
    resolve,
)
from fngraph.core.resolution import OLD_FLAGS
from fngraph.errors import ModesError, SizesError

LETTER = {
    "N": Mode.NONE,
    "P": Mode.PIECEWISE,
    "F": Mode.FULL,
    "D": Mode.FULL_DECODE_ONLY,
    "B": Mode.FULL_AND_PIECEWISE,
}
LEVELS = (
    Support.ALWAYS,
    Support.UNIFORM_BATCH,
    Support.UNIFORM_SINGLE_TOKEN_DECODE,
    Support.NEVER,
)
REQUESTED = ("PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
TABLE = [  # cut, query_len, a word a level: what PIECEWISE, FULL, ... resolve to; !: an error
    ("yes", 1, "PFDB PBDB PBDB P!PP"),
    ("yes", 3, "PFDB PBDB PPPP P!PP"),
    ("declined", 1, "NFDF NDDD NDDD N!N!"),
    ("declined", 3, "NFDF NDDD NNNN N!N!"),
    ("no", 1, "NFDD NDDD NDDD N!NN"),
    ("no", 3, "NFDD NDDD NNNN N!NN"),
]


@pytest.mark.parametrize(("cut", "query_len", "words"), TABLE)
def test_the_whole_table(cut, query_len, words):
    for level, word in zip(LEVELS, words.split()):
        for requested, letter in zip(REQUESTED, word):
            if letter == "!":
                with pytest.raises(ModesError):
                    resolve(requested, level, cut, (query_len,))
                continue
            found = resolve(requested, level, cut, (query_len,))
            assert found.modes is LETTER[letter]
            assert found.requested is Mode.parse(requested)
            assert bool(found.reasons) == (found.modes is not found.requested)
            full = found.modes.decode is Mode.FULL
            assert found.query_lens == ((query_len,) if full else ())
            assert found.sizes.uniform.keys() == set(found.query_lens)
            again = resolve(found.modes, level, cut, (query_len,))
            assert again.modes is found.modes and not again.reasons, "resolved is a fixed point"


@pytest.mark.parametrize(("level", "cut"), list(product(LEVELS, ("yes", "declined", "no"))))
def test_none_stays_none(level, cut):
    assert resolve("NONE", level, cut) == Resolution(Mode.NONE, Mode.NONE)


@pytest.mark.parametrize(("level", "requested"), list(product(LEVELS, REQUESTED)))
def test_piecewise_is_never_lost_where_a_cut_is_available(level, requested):
    for query_len in (1, 3):
        if (level, requested) == (Support.NEVER, "FULL"):
            continue
        asked = Mode.parse(requested)
        found = resolve(requested, level, "yes", (query_len,)).modes
        assert found.mixed is not Mode.NONE or asked.mixed is Mode.NONE
        assert found.strength > 0


REASONS = [
    (dict(modes="NONE", support=Support.NEVER), []),
    (dict(modes="FULL", eager=True), ["FULL -> NONE: eager=True"]),
    (
        dict(modes="PIECEWISE", cut="no"),
        ["PIECEWISE -> NONE: nothing can cut the graph at attention"],
    ),
    (
        dict(cut="no"),
        ["FULL_AND_PIECEWISE -> FULL_DECODE_ONLY: nothing can cut the graph at attention"],
    ),
    (
        dict(cut="declined"),
        ["FULL_AND_PIECEWISE -> FULL: cutting at attention was declined"],
    ),
    (
        dict(modes="PIECEWISE", cut="declined"),
        ["PIECEWISE -> NONE: cutting at attention was declined"],
    ),
    (
        dict(pooling=True),
        ["FULL_AND_PIECEWISE -> PIECEWISE: a pooling model has no decode batches"],
    ),
    (
        dict(modes="FULL", pooling=True, cut="no"),
        [
            "FULL -> PIECEWISE: a pooling model has no decode batches",
            "PIECEWISE -> NONE: nothing can cut the graph at attention",
        ],
    ),
    (
        dict(encoder_decoder=True),
        [
            (
                "FULL_AND_PIECEWISE -> FULL_DECODE_ONLY: prefill of an encoder-decoder model reads "
                "fresh encoder outputs"
            )
        ],
    ),
    (
        dict(modes="PIECEWISE", encoder_decoder=True, support=Support.NEVER),
        [
            (
                "PIECEWISE -> FULL_DECODE_ONLY: prefill of an encoder-decoder model reads fresh "
                "encoder outputs"
            ),
            "FULL_DECODE_ONLY -> PIECEWISE: attention (NEVER) can never be captured",
        ],
    ),
    (
        dict(modes="PIECEWISE", encoder_decoder=True, cut="no"),
        ["PIECEWISE -> NONE: nothing can cut the graph at attention"],
    ),
    (
        dict(layerwise=True),
        ["FULL_AND_PIECEWISE -> PIECEWISE: something has to run between the layers"],
    ),
    (
        dict(modes="FULL_DECODE_ONLY", layerwise=True, cut="no"),
        [
            "FULL_DECODE_ONLY -> PIECEWISE: something has to run between the layers",
            "PIECEWISE -> NONE: nothing can cut the graph at attention",
        ],
    ),
    (
        dict(modes="FULL", support={"layers.3 flashinfer": Support.UNIFORM_BATCH}),
        [
            (
                "FULL -> FULL_AND_PIECEWISE: layers.3 flashinfer (UNIFORM_BATCH) captures uniform "
                "batches only"
            )
        ],
    ),
    (
        dict(modes="FULL", support=2, cut="no"),
        ["FULL -> FULL_DECODE_ONLY: attention (UNIFORM_BATCH) captures uniform batches only"],
    ),
    (
        dict(
            support={
                "fa3": Support.ALWAYS,
                "gdn": Support.UNIFORM_SINGLE_TOKEN_DECODE,
                "mamba": Support.UNIFORM_SINGLE_TOKEN_DECODE,
            },
            query_lens=(2, 4),
        ),
        [
            (
                "FULL_AND_PIECEWISE -> PIECEWISE: gdn and 1 more (UNIFORM_SINGLE_TOKEN_DECODE) "
                "captures query_len 1 only, and batches come with 2 or 4"
            )
        ],
    ),
    (
        dict(modes="FULL", support=Support.UNIFORM_SINGLE_TOKEN_DECODE, query_lens=(3,), cut="no"),
        [
            (
                "FULL -> FULL_DECODE_ONLY: attention (UNIFORM_SINGLE_TOKEN_DECODE) captures "
                "uniform batches only"
            ),
            (
                "FULL_DECODE_ONLY -> NONE: attention (UNIFORM_SINGLE_TOKEN_DECODE) captures "
                "query_len 1 only, and batches come with 3"
            ),
        ],
    ),
    (
        dict(support=Support.NEVER, cut="no"),
        [
            "FULL_AND_PIECEWISE -> FULL_DECODE_ONLY: nothing can cut the graph at attention",
            "FULL_DECODE_ONLY -> NONE: attention (NEVER) can never be captured",
        ],
    ),
]


@pytest.mark.parametrize(("options", "reasons"), REASONS)
def test_every_step_says_why(options, reasons):
    found = resolve(**options)
    assert list(found.reasons) == reasons
    lines = [f"{found.requested} requested", *reasons, f"{found.modes} resolved"]
    assert found.as_text() == "\n".join(lines)


def test_one_query_length_does_not_take_the_others_with_it():
    found = resolve("FULL", Support.UNIFORM_SINGLE_TOKEN_DECODE, query_lens=(3, 1, 2))
    assert (found.modes, found.query_lens) == (Mode.FULL_AND_PIECEWISE, (1,))
    assert found.sizes.uniform.keys() == {1}
    assert found.reasons[-1] == (
        "FULL_AND_PIECEWISE keeps query_len 1 but not 3 or 2: "
        "attention (UNIFORM_SINGLE_TOKEN_DECODE) stops there"
    )


def test_a_model_without_attention_allows_all():
    assert resolve("FULL", {}).modes is Mode.FULL


def test_full_of_what_can_never_be_captured():
    with pytest.raises(ModesError) as info:
        resolve("FULL", {"whisper": Support.NEVER})
    assert str(info.value) == (
        'modes="FULL", but whisper (NEVER) can never be captured. Pass modes="FULL_AND_PIECEWISE".'
    )
    with pytest.raises(ModesError, match=r'Pass modes="NONE"\.'):
        resolve("FULL", Support.NEVER, "no")


def test_state_blocks_bound_the_requests_of_full_batches():
    resolve("FULL", state_blocks=256)
    resolve("PIECEWISE", state_blocks=100)
    with pytest.raises(ModesError) as info:
        resolve("FULL_DECODE_ONLY", state_blocks=100, limits=Limits(512, 101))
    assert str(info.value) == (
        "FULL_DECODE_ONLY captures up to max_reqs=101 requests, but there are 100 blocks of "
        'recurrent state. Pass Limits(max_reqs=100), or modes="PIECEWISE".'
    )
    assert resolve("FULL_AND_PIECEWISE", Support.NEVER, state_blocks=1).modes is Mode.PIECEWISE


def test_sizes_come_with_it():
    limits = Limits(512, 16)
    found = resolve("FULL_AND_PIECEWISE", query_lens=(1, 2), limits=limits)
    assert found.sizes == ladders(default_sizes(limits, (1, 2)), (1, 2), 16)
    assert resolve("NONE", limits=limits).sizes == Ladders()
    assert resolve("PIECEWISE", limits=limits, sizes=[2, 4]).sizes == Ladders((2, 4))
    found = resolve("FULL", limits=limits, sizes=[1, 8, 16], query_lens=(3,), align="all")
    assert found.sizes.mixed == (3, 9, 15)
    found = resolve("FULL", limits=limits, sizes=[1, 8, 16], query_lens=(3,), beyond="drop")
    assert found.sizes == Ladders((1, 8, 16), ((3, (3, 9)),))
    found = resolve("PIECEWISE", limits=limits, sizes=[1, 8], query_lens=(3,), align="all")
    assert found.sizes.mixed == (1, 8)  # nothing uniform is captured, so nothing is aligned
    assert resolve().sizes == ladders(default_sizes(Limits()))


def test_unknown_words():
    with pytest.raises(ModesError) as info:
        resolve(cut="maybe")
    assert str(info.value) == 'cut=\'maybe\' is unknown. Pass cut="yes", "declined" or "no".'
    with pytest.raises(ModesError, match="is not a mode"):
        resolve("HALF")
    with pytest.raises(SizesError, match="must be distinct and positive"):
        resolve(query_lens=())


def test_old_flags_are_gone_but_for_advice():
    assert OLD_FLAGS == {
        "use_cudagraph": '. Pass modes="PIECEWISE", or modes="NONE" in place of False.',
        "full_cuda_graph": '. Pass modes="FULL", or modes="PIECEWISE" in place of False.',
    }
    for flag in OLD_FLAGS:
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{flag}'"):
            resolve(**{flag: True})
