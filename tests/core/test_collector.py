"""Pauses of the collector: they overlap in threads, and leave it as it was."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from fngraph.core.collector import without_collector


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_it_is_off_meanwhile_and_on_again_whatever_happens():
    with pytest.raises(ZeroDivisionError), without_collector():
        with without_collector():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise ZeroDivisionError
    assert gc.isenabled()


def test_it_stays_off_for_whoever_had_it_off():
    gc.disable()
    with without_collector():
        pass
    assert not gc.isenabled()


def test_a_pause_that_ends_does_not_end_that_of_another_thread():
    """A capture would end with the collection that follows: it may free an old graph."""
    begun, end = threading.Event(), threading.Event()

    def elsewhere() -> None:
        with without_collector():
            begun.set()
            end.wait(60)

    other = threading.Thread(target=elsewhere)
    other.start()
    assert begun.wait(60)
    with without_collector():
        end.set()
        other.join()
        assert not gc.isenabled()
    assert gc.isenabled()
