"""What kernels may not do, since Triton makes another one of the same source for other arguments.

A number that is 1 becomes a constant of the kernel. One that is then given another value within an
`if` or a loop cannot be compiled: a cache of one head of one number was refused on a GPU, which no
interpreter shows.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from fngraph.ops.triton.launching import COUNTS

KERNELS = Path(__file__).parents[2] / "fngraph" / "ops" / "triton"


def rebound(source: str) -> Iterator[str]:
    """Numbers of kernels that may be constants, and that a branch or a loop gives another value."""
    for kernel in ast.walk(ast.parse(source)):
        if isinstance(kernel, ast.FunctionDef) and kernel.name.endswith("_kernel"):
            given = {arg.arg for arg in kernel.args.args if arg.annotation is None} - {*COUNTS}
            blocks = (x for x in ast.walk(kernel) if isinstance(x, ast.If | ast.For | ast.While))
            within = (x for block in blocks for x in ast.walk(block))
            stored = {x.id for x in within if isinstance(x, ast.Name) and type(x.ctx) is ast.Store}
            yield from (f"{kernel.name}: {name}" for name in sorted(given & stored))


@pytest.mark.parametrize("path", sorted(KERNELS.rglob("*.py")), ids=lambda path: path.stem)
def test_no_kernel_gives_a_number_another_value_where_it_may_be_a_constant(path: Path):
    assert not list(rebound(path.read_text()))


def test_such_a_kernel_is_found():
    lines = (
        "def a_kernel(x, step, T, D: tl.constexpr):",
        "    if x:",
        "        step //= 2",
        "        T = 1",
    )
    assert list(rebound("\n".join(lines))) == ["a_kernel: step"]
