"""Torch's own collectives within `forward` are refused, whichever way they are called."""

from __future__ import annotations

from typing import Any

import pytest
import starting
from rank_transports import CALLS, texts


@pytest.fixture(scope="module")
def found() -> Any:
    return starting.values(starting.run(texts, 1))[0]


@pytest.mark.parametrize("name", CALLS)
def test_a_collective_of_torchs_own_is_refused(found: Any, name: str) -> None:
    said, listed = found[name]
    assert said.startswith("RankError: ") and "rank_transports.py:" in said, said
    assert CALLS[name][1] in said and "speaks to other processes" in listed, (said, listed)
