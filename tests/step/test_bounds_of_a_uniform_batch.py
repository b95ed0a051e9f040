"""A spec's query_len is a bound that a backend gets in every mode, not in FULL alone."""

from __future__ import annotations

from typing import Any

import pytest
import toys

import fngraph as fg
from fngraph.ops import ATTENTION, Backend
from fngraph.ops.paged import reference


@pytest.mark.parametrize("modes", ["NONE", "PIECEWISE", "FULL"])
def test_a_backend_knows_what_the_spec_says(modes, monkeypatch):
    seen = []

    def run(args: Any, host: Any) -> None:
        seen.append(host.max_query_len)
        reference.run(args, host)

    mine = Backend("mine", run, lambda config: fg.Support.UNIFORM_BATCH)
    monkeypatch.setitem(ATTENTION.backends, "mine", mine)
    params, cache = toys.attention_params(1), toys.attention_cache(1)
    fast = fg.graphify(
        toys.attend, modes=modes, donate="cache", stage="batch", limits=toys.LIMITS,
        sizes=toys.SIZES, backends={"attention": "mine"},
    )  # fmt: skip
    fast(params, cache, toys.decode(2))
    assert set(seen) == {1}
