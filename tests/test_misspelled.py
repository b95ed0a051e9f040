"""Names that are misspelled: each error says which is meant."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import toys

import fngraph as fg
from fngraph import core
from fngraph.core.text import with_suggestions
from fngraph.models import Policy, Settings, start, submit

STAGED = {"donate": "cache", "stage": "batch"}
POLICY = Policy(16, 4, 4)


def asked(**options: Any) -> Callable[[], Any]:
    return lambda: fg.graphify(toys.attend, **STAGED | options)


def taken(step: str, *args: Any, **kwargs: Any) -> Callable[[], Any]:
    """A call of a method of a step."""

    def call() -> Any:
        made = asked(limits=toys.LIMITS)().bind(toys.attention_params())
        cache = toys.attention_cache()
        one = made.capture(cache, recorder="tape", lazy=True, progress=False)
        return getattr(one, step)(*(cache if x is CACHE else x for x in args), **kwargs)

    return call


CACHE = object()
SPEC = fg.BatchSpec(2, 2, query_len=1)
MISSPELLED: dict[str, tuple[Callable[[], Any], str]] = {
    "an option": (asked(compil="none"), "'compile'"),
    "what is staged": (asked(stages="batch"), "'stage'"),
    "a primitive as an option": (asked(atention="triton"), 'backends={"attention": ...}'),
    "a parameter": (asked(donate="cashe"), 'donate="cache"'),
    "a primitive": (asked(backends={"atention": "sdpa"}), "'attention'"),
    "a backend": (asked(backends={"attention": "spda"}), "'sdpa'"),
    "a level": (asked(compile="peices"), "'pieces'"),
    "a pass": (asked(passes=("silu_mull",)), "'silu_mul'"),
    "an option of a capture": (lambda: asked()().bind({}).capture((), bacth=1), "'batch'"),
    "an option of an encoder": (lambda: fg.graphify_encoder(None, None, budgts=3), "'budgets'"),
    "an option of check": (lambda: fg.check(toys.attend, stagee="batch"), "'stage'"),
    "an option of a field": (lambda: fg.buffer("T", "int64", padd=0), "'pad'"),
    "a dtype": (lambda: fg.buffer("T", "int46"), "'int64'"),
    "an option of Verify": (lambda: fg.Verify(shar=1), "'share'"),
    "a bound": (lambda: fg.Limits(max_request=4), "'max_reqs'"),
    "an option of resolve": (lambda: fg.resolve(layer_wise=True), "'layerwise'"),
    "an option of ladders": (lambda: core.ladders((1, 2), (1,), 4, alig="all"), "'align'"),
    "an option of build_table": (lambda: core.build_table(limit=None), "'limits'"),
    "an option of plan_sizes": (lambda: core.plan_sizes({1: 1}, memory_budgt=3),
                               "'memory_budget'"),
    "an option of bisect": (lambda: fg.bisect(None, None, withn=None), "'within'"),
    "a setting": (lambda: Settings(temprature=1.0), "'temperature'"),
    "a field of a policy": (lambda: Policy(max_token=3), "'max_tokens'"),
    "another policy": (lambda: dataclasses.replace(POLICY, blocksize=16), "'block_size'"),
    "an option of submit": (
        lambda: submit(start(8, POLICY), POLICY, (1,), 3, setings=None), "'settings'"),
    "a public name": (lambda: fg.graphfy, "'graphify'"),
    "a name of models": (lambda: fg.models.sumbit, "'submit'"),
    "an argument of a step": (taken("__call__", CACHE, bacth=1), "'batch'"),
    "a mode of a step": (taken("__call__", CACHE, toys.decode(2), allowed=("FUL",)), '"FULL"'),
    "a leaf": (taken("static_buffer", core.BatchDescriptor(2, 2, 1), "seq_len"),
               "'batch.seq_lens'"),
    "a path": (taken("rebind", params={"params['haed']": torch.ones(1)}), "\"params['head']\""),
    "a table": (taken("host_batch", SPEC, block_table=None), None),
    "an axis": (lambda: fg.Mesh((fg.Axis("data", 1, 0, "x"),))["dat"], "'data'"),
}  # fmt: skip


@pytest.mark.parametrize("what", [name for name, (_, meant) in MISSPELLED.items() if meant])
def test_the_nearest_name_is_suggested(what: str):
    call, meant = MISSPELLED[what]
    with pytest.raises((TypeError, ValueError, LookupError, AttributeError, RuntimeError)) as told:
        call()
    text = str(told.value)
    assert meant in text and any(word in text.lower() for word in ("did you mean", "pass ")), text


@pytest.mark.parametrize("what", [name for name, (_, meant) in MISSPELLED.items() if not meant])
def test_what_is_like_no_other_name_is_told_as_it_is(what: str):
    with pytest.raises((TypeError, ValueError)) as told:
        MISSPELLED[what][0]()
    assert "Did you mean" not in str(told.value)


def test_names_that_python_looks_for_are_no_misspellings():
    for module in (fg, fg.models):
        assert not hasattr(module, "__wrapped__") and not hasattr(module, "_repr_html_")
        with pytest.raises(AttributeError, match=r"no attribute '__al__'$"):
            module.__al__  # noqa: B018


@with_suggestions
def adds(first: int, second: int = 0) -> int:
    return first + second


@with_suggestions
@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: int = 0


def test_what_goes_on_within_is_not_taken_for_a_misspelling():
    with pytest.raises(TypeError, match="unsupported operand"):
        adds(1, second="a")
    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'first'"):
        adds()
    with pytest.raises(TypeError, match="takes from 1 to 2 positional"):
        adds(1, 2, 3)
    with pytest.raises(TypeError, match=r"adds\(\) got an unexpected keyword argument 'zzz'"):
        adds(1, zzz=3)
    with pytest.raises(TypeError, match=r"'secnd'\. Did you mean 'second'\?"):
        adds(1, secnd=3)
    assert adds(1, second=2) == 3 and pickle.loads(pickle.dumps(adds)) is adds
    one = Point(1, y=2)
    assert copy.deepcopy(one) == pickle.loads(pickle.dumps(one)) == dataclasses.replace(one) == one
    settings = Settings(temperature=0.5)
    assert pickle.loads(pickle.dumps(settings)) == settings._replace() == settings


@pytest.mark.skipif(sys.version_info < (3, 13), reason="Python itself suggests names from 3.13 on")
def test_python_suggests_by_itself():
    with pytest.raises(TypeError, match="Did you mean 'second'"):
        (lambda second: second)(secnd=3)
