"""What tests of graphified functions assert: how many kernels and copies a captured key has."""

from __future__ import annotations

from collections.abc import Callable, Container

from fngraph.core.kinds import checked
from fngraph.graphs.replay import Replay

Expected = int | Container[int] | Callable[[int], bool]
"""A number, `range(3, 6)` or another container of numbers, or `lambda n: n < 6`."""


@checked
def assert_graph(
    replay: Replay,
    *,
    nodes: Expected | None = None,
    kernels: Expected | None = None,
    memcpys: Expected | None = None,
    memsets: Expected | None = None,
) -> None:
    """Assert what a key's graphs hold, all together: `assert_graph(step[key], kernels=7)`.

    The node that takes the batch in is one of the kernels. On the tape each computing ATen call is
    a kernel; see docs/recorders.md for what CUDA counts otherwise.

    Raises:
        AssertionError: with what was expected, what is there, and the kernels by name.
        PackageError: on CUDA, without `cuda.bindings`.
    """
    counts = replay.counts
    wanted = {"nodes": nodes, "kernels": kernels, "memcpys": memcpys, "memsets": memsets}
    wrong = [
        f"expected {name}={_shown(want)}, got {getattr(counts, name)}"
        for name, want in wanted.items()
        if want is not None and not _holds(want, getattr(counts, name))
    ]
    if wrong:
        raise AssertionError("\n".join([f"{replay!r}:", *wrong, counts.as_text()]))


def _holds(want: Expected, got: int) -> bool:
    if isinstance(want, int):
        return got == want
    return want(got) if callable(want) else got in want


def _shown(want: Expected) -> str:
    return getattr(want, "__name__", "") or repr(want)
