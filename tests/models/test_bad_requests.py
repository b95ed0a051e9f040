"""Requests with bad ones among them: the good ones get what they get alone, the bad their reasons.

A sample; 2,000 of them, in some minutes:

    python -m tests.models.bad_requests
"""

from __future__ import annotations

import pytest

from tests.models.bad_requests import BAD, draw, hold


@pytest.mark.sampled(0)
def test_a_sample_of_requests_with_bad_ones_among_them():
    assert {one.bad for one in draw(160, 20)} >= set(BAD)
    counts = hold(160, 20)
    assert counts["length"] > 80 and min(counts["bad"], counts["refused"]) > 8, counts
    assert min(counts[how] for how in ("cancelled", "thrown", "time", "stop")) > 2, counts
    assert counts["reused"] > 300, counts
