"""Rows over T and R: what mixes them is refused when traced; what keeps them equals bare forward.

The tables of functions are in rows_mixed.py, rows_subtle.py,
rows_kept.py and rows_states.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from rows_given import check, graphified, output, params, trace, update
from rows_kept import KEPT, REFUSED
from rows_mixed import MIXED, SIZED
from rows_states import KEPT_STATE, MIXED_STATE
from rows_subtle import SUBTLE

import fngraph as fg
from fngraph.errors import BranchError, RowsError

MIXED_ALL = {name: (output, value) for name, value in (MIXED | SUBTLE).items()}
MIXED_ALL |= {f"state: {name}": (update, value) for name, value in MIXED_STATE.items()}
KEPT_ALL = {name: (output, value) for name, value in KEPT.items()}
KEPT_ALL |= {f"state: {name}": (update, value) for name, value in KEPT_STATE.items()}


def lines(value: Callable[..., Any]) -> range:
    """The lines that a lambda's code is on, those of lambdas within it too."""
    codes = [value.__code__]
    codes += [c for c in value.__code__.co_consts if hasattr(c, "co_lines")]
    found = [line for code in codes for *_, line in code.co_lines() if line]
    return range(min(found), max(found) + 1)


@pytest.mark.sampled(40)
@pytest.mark.parametrize("name", MIXED_ALL)
def test_what_mixes_rows_is_refused_at_its_line(name: str) -> None:
    """Its file and line, and the output that padding reaches."""
    forward, value = MIXED_ALL[name]
    with pytest.raises(RowsError) as caught:
        trace(forward(value))
    said = re.match(r"(.+):(\d+): forward .* It reaches output\[[01]\]", str(caught.value), re.S)
    assert said, caught.value
    assert Path(said[1]).name == Path(value.__code__.co_filename).name
    assert int(said[2]) in lines(value)


@pytest.mark.parametrize("name", SIZED)
def test_what_fixes_a_size_or_asks_for_it_is_a_branch(name: str) -> None:
    """Such a function's shapes differ from batch to batch, so no key's result has a true part."""
    with pytest.raises(BranchError, match=r"^\S*rows_mixed\.py:\d+: "):
        trace(output(SIZED[name]))


@pytest.mark.sampled(20)
@pytest.mark.parametrize("name", KEPT_ALL)
def test_what_keeps_rows_equals_bare_forward(name: str) -> None:
    """In FULL, PIECEWISE and NONE, with padding of tokens and of requests."""
    forward, value = KEPT_ALL[name]
    check(forward(value))


@pytest.mark.parametrize("name", REFUSED)
def test_what_keeps_rows_by_reasons_that_no_rule_sees_is_refused(name: str) -> None:
    """Knowingly: `fg.trust_rows` says what the rules cannot see, and the function is right."""
    refused, trusted, reason = REFUSED[name]
    with pytest.raises(RowsError, match=reason):
        trace(output(refused))
    check(output(trusted))


def test_refused_before_anything_is_captured_or_written() -> None:
    """State is as it was, and the error comes again at the next call."""

    def forward(p: Any, s: Any, b: Any) -> Any:
        s["seen"].add_(1)
        return output(MIXED["sum(0)"])(p, {**s, "total": s["total"] + 1}, b)

    fast = graphified(forward)
    state = toys.tally_state()
    for _ in range(2):
        with pytest.raises(RowsError, match="takes sum over T"):
            fast(params(), state, toys.batch(3, 2))
    toys.assert_trees(state, toys.tally_state())


def test_the_first_op_is_named_not_those_that_pass_it_on() -> None:
    """Everything behind a mixed value is mixed; the error is about where it began."""

    def value(x: Any, p: Any, b: Any) -> Any:
        y = x.mean(0)
        return {"deep": [(x - y).relu() @ p["w"].t()]}

    first = value.__code__.co_firstlineno + 1
    with pytest.raises(
        RowsError, match=rf"{Path(__file__).name}:{first}: forward takes mean over T"
    ):
        trace(output(value))
    with pytest.raises(RowsError, match=r"It reaches output\[0\]\['deep'\]\[0\]$"):
        trace(output(value))


def test_a_mixed_value_that_reaches_no_output_is_nobodys_business() -> None:
    """Only what is returned, or written, must keep its rows."""
    check(output(lambda x, p, b: (x.sum(0), x * 2)[1]))


def test_trust_rows_is_the_identity_in_eager() -> None:
    """Same elements, no copy."""
    x = torch.arange(6.0).view(3, 2)
    y = fg.trust_rows(x)
    assert y.data_ptr() == x.data_ptr() and y.shape == x.shape and y.stride() == x.stride()


def test_trust_rows_leaves_no_op_in_the_graph() -> None:
    """The view that carries the word is gone once the rows are checked."""
    plain = trace(output(lambda x, p, b: x * 2))
    trusted = trace(output(lambda x, p, b: fg.trust_rows(fg.trust_rows(x) * 2)))
    ops = [[n.target for n in t.graph.gm.graph.nodes] for t in (plain, trusted)]
    assert ops[0] == ops[1]


def test_trust_rows_speaks_for_one_value_alone() -> None:
    """What is computed from a trusted value is checked again."""
    with pytest.raises(RowsError, match="takes mean over T"):
        trace(output(lambda x, p, b: fg.trust_rows(x.flip(0)).mean(0)))
