"""`fngraph.core.limits`: bounds by letter, and specs beyond them."""

import pickle

import pytest

from fngraph.core import BatchSpec, Limits
from fngraph.errors import SpecError


def test_bounds_by_name_and_by_letter():
    limits = Limits(64, 8, B=512, A=3)
    assert (limits.max_tokens, limits.max_reqs, limits.dims) == (64, 8, {"A": 3, "B": 512})
    assert (limits["T"], limits["R"], limits["B"]) == (64, 8, 512)
    assert (Limits().max_tokens, Limits().max_reqs, Limits().dims) == (8192, 256, {})


def test_frozen_hashable_and_shown():
    limits = Limits(64, 8, B=512, A=3)
    assert repr(limits) == "Limits(max_tokens=64, max_reqs=8, A=3, B=512)"
    assert eval(repr(limits)) == limits and hash(eval(repr(limits))) == hash(limits)
    assert limits != Limits(64, 8, B=512) and pickle.loads(pickle.dumps(limits)) == limits
    limits.dims["B"] = 1
    assert limits["B"] == 512
    with pytest.raises(AttributeError):
        limits.max_tokens = 3


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        (
            {"max_tokens": 0},
            "Limits(max_tokens=0) is not a positive integer. Pass max_tokens=1 or more.",
        ),
        (
            {"max_reqs": -1},
            "Limits(max_reqs=-1) is not a positive integer. Pass max_reqs=1 or more.",
        ),
        ({"B": 2.0}, "Limits(B=2.0) is not a positive integer. Pass B=1 or more."),
        (
            {"max_token": 5},
            (
                "Limits(max_token=5): 'max_token' is no shape letter. Did you mean 'max_tokens'? "
                "Pass max_tokens=, max_reqs=, and single capitals such as B=512."
            ),
        ),
        (
            {"b": 5},
            (
                "Limits(b=5): 'b' is no shape letter. Pass max_tokens=, max_reqs=, and "
                "single capitals such as B=512."
            ),
        ),
        ({"T": 5}, "Limits(T=5) bounds T twice. Pass max_tokens=5."),
        ({"R": 5}, "Limits(R=5) bounds R twice. Pass max_reqs=5."),
    ],
)
def test_bad_bounds(bounds, message):
    with pytest.raises(SpecError) as info:
        Limits(**bounds)
    assert str(info.value) == message


def test_unknown_letter():
    with pytest.raises(SpecError) as info:
        Limits(B=2)["Q"]
    assert str(info.value) == "Limits bound T, R, B, not 'Q'. Pass Limits(..., Q=...)."


def test_one_is_enough_and_requests_may_outnumber_tokens():
    assert Limits(1, 1, B=1)["B"] == 1
    assert Limits(64, 512).max_reqs == 512


def test_check_names_the_limit():
    limits = Limits(8, 4)
    limits.check(BatchSpec(8, 4))
    with pytest.raises(SpecError) as info:
        limits.check(BatchSpec(9, 4))
    assert str(info.value) == (
        "BatchSpec(num_tokens=9, num_reqs=4) is beyond Limits(max_tokens=8). "
        "Schedule fewer tokens, or pass Limits(max_tokens=9)."
    )
    with pytest.raises(SpecError) as info:
        limits.check(BatchSpec(8, 5))
    assert str(info.value) == (
        "BatchSpec(num_tokens=8, num_reqs=5) is beyond Limits(max_reqs=4). "
        "Schedule fewer requests, or pass Limits(max_reqs=5)."
    )


@pytest.mark.parametrize("name", ["max_token", "b", "BB"])
def test_a_letter_that_is_none(name):
    """A misspelled bound must not pass for a shape letter and leave the real one at its default."""
    message = (
        rf"Limits\({name}=4\): {name!r} is no shape letter\..* Pass max_tokens=, max_reqs=, and"
    )
    with pytest.raises(SpecError, match=message):
        Limits(64, 8, **{name: 4})
