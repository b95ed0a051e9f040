"""An argument of another kind, whichever of a method it is: the error is one that fngraph raises
itself, and not an attribute that some line inside misses."""

from __future__ import annotations

import enum
import inspect
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import pytest
import toys

import fngraph as fg
from fngraph import errors
from fngraph.core.kinds import checked

BAD = ["x", None, 4, -1, 2.5, object()]
WITHIN = {  # what stages hand on to one another, and no caller makes
    ("Traced", "computes_as"), ("Lowered", "compile"), ("Lowered", "runs"),
    ("DispatchTable", "order"),
}  # fmt: skip
MADE = {"Board", "DispatchTable", "Encoder", "Grid", "KeyBounds", "Stats", "Step"}
"""Classes that fngraph makes, and no caller."""
ELSE = {"quantize_fp8", "quantize_fp8_rows", "scaled_linear", "write_cache"}
"""Ops of tensors, whose kinds torch looks at."""


def public() -> dict[str, Callable[..., Any]]:
    """Functions and classes that a user calls, by module and name."""
    found = {}
    for module in (fg, fg.core, fg.integrations, fg.ops, fg.passes, fg.report, fg.testing):
        for name in getattr(module, "__all__", None) or dir(module):
            one = getattr(module, name)
            ours = getattr(one, "__module__", "").startswith("fngraph")
            called = ours and (inspect.isfunction(one) or inspect.isclass(one))
            known = inspect.isclass(one) and issubclass(one, enum.Enum | Exception)
            if called and not known and name not in MADE | ELSE:
                found[f"{module.__name__.removeprefix('fngraph.')}.{name}"] = one
    return found


PUBLIC = public()


SAID_BY_OTHERS = re.compile("os.PathLike|device string")


def said_by_us(error: Exception) -> bool:
    """Whether the innermost frame is a `raise` of fngraph's."""
    *_, last = traceback.extract_tb(error.__traceback__)
    return "fngraph" in last.filename and (last.line or "").startswith("raise")


def calls(fn: Callable[..., Any]) -> Iterator[tuple[str, list[Any], dict[str, Any]]]:
    """Its arguments, each of another kind in turn, and all that it cannot do without as well."""
    taken = [
        p for p in inspect.signature(fn).parameters.values()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]  # fmt: skip
    for tried in taken:
        for bad in BAD:
            given = [p for p in taken if p is tried or p.default is p.empty]
            by_name = [p for p in given if p.kind is p.KEYWORD_ONLY or p.default is not p.empty]
            args = [bad for p in given if p not in by_name]
            yield f"{tried.name}={bad!r}", args, {p.name: bad for p in by_name}


def faults(name: str, fn: Callable[..., Any]) -> Iterator[str]:
    """Calls that end in an error of Python's own."""
    for told, args, named in calls(fn):
        try:
            fn(*args, **named)
        except Exception as error:
            if not said_by_us(error) and not SAID_BY_OTHERS.search(str(error)):
                yield f"{name}({told}): {type(error).__name__}: {error}"


def held() -> dict[str, Any]:
    """What a user has in hand, by its class; a step that is verified and recorded among them."""
    options = {"donate": "cache", "stage": "batch", "limits": toys.LIMITS, "sizes": toys.SIZES}
    params, cache = toys.attention_params(1), toys.attention_cache(1)
    plain = fg.graphify(toys.attend, recorder="tape", **options)
    verified = fg.graphify(toys.attend, recorder="tape", verify=0.5, **options)
    traced = plain.trace(params, cache)
    lowered = traced.split().lower()
    step, watched = plain.bind(params).capture(cache), verified.bind(params).capture(cache)
    recorded = plain.bind(params).capture(cache, record=9)
    model = step.launch_model(toys.CONSTANTS)
    found = [
        traced, lowered, lowered.compile(), step, watched, recorded, step.table, toys.LIMITS,
        recorded.log, model,
    ]  # fmt: skip
    return {type(one).__name__: one for one in found}


KINDS = [
    "Traced",
    "Lowered",
    "Compiled",
    "Step",
    "VerifiedStep",
    "RecordedStep",
    "DispatchTable",
    "Limits",
    "Log",
    "LaunchModel",
]


@pytest.fixture(scope="module")
def in_hand() -> dict[str, Any]:
    """`held`, made once: what is called with a wrong argument changes nothing."""
    found = held()
    assert list(found) == KINDS
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_methods_say_what_they_were_given(
    in_hand: dict[str, Any], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)  # a file may well be called "x"
    one, found, tried = in_hand[kind], list[str](), 0
    for name in dir(type(one)):
        static = inspect.getattr_static(type(one), name)
        shown = not name.startswith("_") or name in ("__getitem__", "__contains__")
        if shown and (kind, name) not in WITHIN and inspect.isfunction(static):
            tried += 1
            found += faults(f"{kind}.{name}", getattr(one, name))
    assert found == [] and tried


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PUBLIC)
def test_functions_say_what_they_were_given(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert [*faults(name, PUBLIC[name])] == []


@checked
def taking(
    a: int,
    b: Sequence[int] = (),
    *more: str,
    c: float | None = None,
    d: Mapping[str, tuple[int, str]] = MappingProxyType({}),
    e: Callable[[], int] | bool = True,
    f: Literal["x", "y"] = "x",
    g: fg.Limits | Iterable[int] = (),
    **rest: int,
) -> nowhere.Known:  # type: ignore[name-defined]  # noqa: F821
    """Arguments of every kind."""
    return a, b, more, c, d, e, f, g, rest


@pytest.mark.parametrize(
    "call",
    [
        lambda: taking(1), lambda: taking(np.int64(1), np.arange(3)), lambda: taking(1, [1, 2]),
        lambda: taking(1, range(3), "m", "n", c=2, z=4), lambda: taking(1, c=2.5),
        lambda: taking(1, d={"k": (1, "v")}, e=lambda: 3, f="y", g=(n for n in (1, 2))),
        lambda: taking(1, g=fg.Limits(8, 4)),
        lambda: taking(a=1, b=(), d={"k": [1, "v"]}),
    ],
)  # fmt: skip
def test_what_fits_is_taken(call: Callable[[], Any]):
    assert call()[0] == 1


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda: taking("1"), "a='1' is a str. Pass an int"),
        (lambda: taking(True), "a=True is a bool. Pass an int"),
        (lambda: taking(1, "12"), "b='12' is a str. Pass a list of ints"),
        (lambda: taking(1, [1, 2.5]), "b[1]=2.5 is a float. Pass an int"),
        (lambda: taking(1, [1], "m", 3), "more[1]=3 is an int. Pass a str"),
        (lambda: taking(1, c="2"), "c='2' is a str. Pass a number or None"),
        (lambda: taking(1, d=[1]), "d=[1] is a list. Pass a dict to a tuple of an int, a str"),
        (lambda: taking(1, d={1: (1, "v")}), "a key of d=1 is an int. Pass a str"),
        (lambda: taking(1, d={"k": (1, 2)}), "d['k'][1]=2 is an int. Pass a str"),
        (lambda: taking(1, d={"k": (1,)}), "d['k']=(1,) is a tuple. Pass a tuple of an int, a str"),
        (lambda: taking(1, e=3), "e=3 is an int. Pass a function or True or False"),
        (lambda: taking(1, f="z"), "f='z' is a str. Pass 'x' or 'y'"),
        (lambda: taking(1, g=["n"]), "g[0]='n' is a str. Pass an int"),
        (lambda: taking(1, z="4"), "z='4' is a str. Pass an int"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_said(call: Callable[[], Any], text: str):
    with pytest.raises(errors.SpecError) as caught:
        call()
    assert str(caught.value) == text


def test_it_has_the_name_that_the_caller_gave_it():
    """And not the one that it has where it is handed on to."""

    @checked
    def outer(mine: int) -> Any:
        return taking(mine)

    with pytest.raises(errors.SpecError, match="mine='1' is a str"):
        outer("1")  # type: ignore[arg-type]


def test_wrong_counts_and_names_are_pythons_to_say():
    for call in (lambda: taking(), lambda: fg.core.default_sizes()):  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="missing 1 required positional argument"):
            call()
    with pytest.raises(TypeError, match="Did you mean 'ceiling'"):
        fg.core.default_sizes(fg.Limits(8, 4), celing=4)  # type: ignore[call-arg]


def test_what_only_some_steps_have_says_how_to_ask_for_it(in_hand: dict[str, Any]):
    for name, fix, kind in (
        ("parts", "verify=1e-3", "VerifiedStep"), ("log", "record=1000", "RecordedStep")
    ):  # fmt: skip
        with pytest.raises(errors.TreeError, match=fix):
            getattr(in_hand["Step"], name)
        assert getattr(in_hand[kind], name) is not None


@pytest.mark.parametrize("word", ["off", 1, "False"])
def test_words_are_no_truth(in_hand: dict[str, Any], word: Any):
    """Each was taken as True."""
    step, cache = in_hand["Step"], toys.attention_cache(1)
    params = toys.attention_params(1)
    for call in (
        lambda: in_hand["Compiled"].capture(params, cache, guards=word),
        lambda: in_hand["Compiled"].capture(params, cache, lazy=word),
        lambda: step.sleep(cache=word), lambda: step.show_ranges(word),
    ):  # fmt: skip
        with pytest.raises(errors.FnGraphError, match="True or False"):
            call()


def test_numbers_that_mean_nothing(in_hand: dict[str, Any]):
    model, log = in_hand["LaunchModel"], in_hand["Log"]
    for share in (-1, -0.05, True, float("nan")):
        for ask in (model.crossing, model.ceiling):
            with pytest.raises(errors.SpecError, match=r"of 0 or more|Pass a number"):
                ask(share)
    with pytest.raises(errors.SpecError, match="0 or more"):
        log.as_text(last=-1)
    with pytest.raises(errors.BackendError, match="name=None is a NoneType"):
        fg.ops.ATTENTION.register(
            fg.ops.Backend(None, lambda args, host: None, support=lambda x: fg.Support.ALWAYS)  # type: ignore[arg-type]
        )


def test_an_attribute_that_is_missed_inside_is_found():
    """Or the above would say little."""

    class Held:
        def key(self, descriptor: Any) -> Any:
            return descriptor.num_tokens

    assert len([*faults("key", Held().key)]) == len(BAD)
