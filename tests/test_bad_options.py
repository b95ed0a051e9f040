"""Options that name nothing, or are of another kind: an error where they are written."""

from __future__ import annotations

from typing import Any

import pytest
import toys
from refusing import BACKEND, MODES, SIZES, TREE, attend, refused

import fngraph as fg
from fngraph import errors

OPTIONS: dict[str, tuple[dict[str, Any], tuple[type, type], list[str]]] = {
    "a mode": ({"modes": "FULL_AND_PICEWISE"}, MODES,
               ["'FULL_AND_PICEWISE'", '"FULL_AND_PIECEWISE"']),
    "a mode that is no name": ({"modes": 3}, MODES, ["3", "FULL"]),
    "a backend": ({"backends": {"attention": "refrence"}}, BACKEND,
                  ["'refrence'", "'reference'", "mean"]),
    "a primitive": ({"backends": {"atention": "reference"}}, BACKEND, ["'atention'", "attention"]),
    "a recorder": ({"recorder": "tapes"}, (errors.CaptureError, RuntimeError),
                   ["'tapes'", '"tape"', '"cuda"']),
    "outputs": ({"outputs": "borow"}, TREE, ["'borow'", '"borrow"']),
    "a donated name": ({"donate": "cash"}, TREE, ["cash", "cache"]),
    "a donated position": ({"donate": 7}, TREE, ["7", "cache"]),
    "a staged name": ({"stage": "batsh"}, TREE, ["batsh", "batch"]),
    "one name twice": ({"stage": "cache"}, TREE, ["cache", "both"]),
    "nothing staged": ({"stage": None}, TREE, ['stage="batch"']),
    "sizes that fall": ({"sizes": (8, 4)}, SIZES, ["(4, 8)"]),
    "sizes twice": ({"sizes": (4, 4)}, SIZES, ["4"]),
    "sizes beyond the limits": ({"sizes": (4, 32)}, SIZES, ["32", "max_tokens=16"]),
    "no sizes": ({"sizes": ()}, SIZES, ["empty"]),
    "a cut": ({"cut": 3}, MODES, ["cut=3", '"declined"']),
    "a rounding": ({"align": "x"}, SIZES, ["align='x'", '"uniform"']),
    "sizes beyond": ({"beyond": None}, SIZES, ["beyond=None", '"drop"']),
    "query lengths twice": ({"query_lens": (1, 1)}, SIZES, ["(1, 1)"]),
}  # fmt: skip
VALUES = [
    ("key_reqs", "x", "'x'", "or None"), ("max_keys", None, None, "a number of"),
    ("max_keys", True, True, "a number of"),
    ("limits", 5, 5, "fg.Limits("), ("sizes", 4, 4, "sizes=(...)"),
    ("query_lens", 4, 4, "query_lens=(...)"), ("query_lens", ("a",), "'a'", "query_lens=(1, 4)"),
    ("fields", (3,), 3, "(field,)"), ("cost", 3, 3, "lambda key"),
    ("adapters", "x", "'x'", "adapters=(0, 4)"), ("adapters", (1.5,), 1.5, "adapters=(0, 4)"),
    ("generators", (3,), 3, "(g,)"), ("state_blocks", "x", "'x'", "or None"),
    *((flag, 3, 3, "True or False") for flag in ("guards", "pooling", "eager", "layerwise")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "said", "fix"), VALUES)
def test_an_option_of_another_kind_fails_where_it_is_written(name, value, said, fix):
    with pytest.raises(TypeError) as caught:
        attend(**{name: value})
    text = str(caught.value)
    assert text.startswith(f"{name}={said}: expected") and fix in text, text


@pytest.mark.parametrize("what", OPTIONS)
def test_an_option_that_names_nothing(what: str):
    options, (kind, builtin), words = OPTIONS[what]
    with refused(kind, builtin, words):
        fast, *held = attend(**options)
        fast(*held, toys.batch(2))
    fast, *held = attend()
    fast(*held, toys.batch(2))


@pytest.mark.parametrize("what", ["a mode", "a backend", "a primitive", "outputs", "a recorder",
                                  "a cut", "a rounding", "sizes beyond"])  # fmt: skip
def test_a_wrong_name_fails_where_it_is_written(what: str):
    """Not at the first call, which may be far away."""
    options, (kind, _), _ = OPTIONS[what]
    with pytest.raises(kind):
        fg.graphify(toys.attend, donate="cache", stage="batch", **options)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nonsense", r"takes no option 'nonsense'\.$"),
        ("use_cudagraph", '\'use_cudagraph\'. Pass modes="PIECEWISE", or modes="NONE"'),
        ("full_cuda_graph", '\'full_cuda_graph\'. Pass modes="FULL", or modes="PIECEWISE"'),
    ],
)
def test_an_unknown_option(name: str, words: str):
    with pytest.raises(TypeError, match=words):
        fg.graphify(toys.attend, donate="cache", stage="batch", **{name: True})


def test_a_forward_that_takes_anything():
    with pytest.raises(errors.TreeError, match=r"\*args"):
        fg.graphify(lambda params, *args: None, stage="params")
