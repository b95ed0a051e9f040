"""What is kept of compiled code loads none of the compiler, and only where that is nobody's loss.

`test_cache.py` has it end to end: what a process that compiles nothing has loaded.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from fngraph.torch_facts import lean

ROOT = Path(__file__).parents[2]
HEADER = """
import torch
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codegen.memory_planning import _align as align
from torch._inductor.select_algorithm import extern_kernels

inductor_ops = torch.ops.inductor
_quantized = torch.ops._quantized
alloc_from_pool = torch.ops.inductor._alloc_from_pool
"""
NEEDED = {
    "a kernel of Inductor's own": "extern_kernels.bias_addmm(x, w)",
    "one that torch has by another name": "extern_kernels.convolution2(x, w)",
    "kernels by a name that is not written": "getattr(extern_kernels, x)(w)",
    "both": "extern_kernels.mm(getattr(extern_kernels, x), w)",
    "a function of the compiler's": "align(x)",
    "an op that Python defines": "torch.ops.inductor.lookup_seed(x, 1)",
    "one by a name of the header": "inductor_ops.lookup_seed(x, 1)",
}
SPARED = {
    "nothing": ("x.sum()", {}),
    "a product": ("extern_kernels.mm(x, w, out=y)", {"mm": torch.mm}),
    "two": (
        "extern_kernels.addmm(extern_kernels.mm(x, w), x, w)",
        {"addmm": torch.addmm, "mm": torch.mm},
    ),
    "an op of torch's own": ("torch.ops.aten.sort.default(x)", {}),
}


def code(body: str) -> str:
    return f"{HEADER}\ndef call(x, w, y):\n    {body}\n"


def imported(source: str) -> list[str]:
    nodes = ast.walk(ast.parse(source))
    return [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]


@pytest.mark.parametrize("body", NEEDED.values(), ids=NEEDED)
def test_what_needs_the_compiler_is_left_as_it_is(body: str):
    assert lean._with_less(code(body), lean._kernels()) is None


@pytest.mark.parametrize(("body", "called"), SPARED.values(), ids=SPARED)
def test_what_does_not_has_torchs_kernels_by_name(body: str, called: dict[str, object]):
    was, made = code(body), lean._with_less(code(body), lean._kernels())
    assert made is not None and imported(made) == ["torch._inductor.async_compile"]
    assert len(made.split("\n")) == len(was.split("\n"))  # as torch's map of lines has them
    ran: dict[str, object] = {}
    exec(made, ran)
    kernels = ran.get("extern_kernels")
    assert vars(kernels) == called if called else kernels is None


def test_a_kernel_that_is_no_longer_torchs_is_not_taken_for_it():
    assert lean._with_less(code("extern_kernels.mm(x, w)"), {"mm": torch.bmm}) is None


@pytest.mark.sampled(0)
def test_whoever_else_asks_for_the_compiler_meanwhile_gets_it():
    """Another thread, that compiles while this one loads; and code that asks for more of it."""
    told = textwrap.dedent("""
        import sys, threading
        import torch
        from fngraph.torch_facts.lean import without_compiler

        found = []

        def compile_something():
            from torch._inductor.graph import GraphLowering
            found.append(GraphLowering)

        with without_compiler():
            from torch._inductor.graph import GraphLowering as stands
            assert stands.save_output_code is None and "torch._inductor.lowering" not in sys.modules
            other = threading.Thread(target=compile_something)
            other.start()
            other.join()
        import torch._inductor.graph
        real = sys.modules["torch._inductor.graph"].GraphLowering
        assert found == [real] and real is not stands and hasattr(real, "run_node")
        with without_compiler():
            from torch._inductor.graph import GraphLowering
            assert GraphLowering is real
        """)
    run(told)


@pytest.mark.sampled(0)
def test_what_debugs_compiled_code_is_there_once_somebody_asks_for_it():
    told = textwrap.dedent("""
        import sys
        import torch._inductor as inductor
        from fngraph.torch_facts.lean import without_debugger

        NAME = "torch._inductor.debug"
        without_debugger()
        assert inductor.debug.RECORD_GRAPH_EXECUTION is False and NAME not in sys.modules
        assert inductor.debug.GRAPH_EXECUTION_ORDER is None
        real = sys.modules[NAME]
        assert inductor.debug is real and real.RECORD_GRAPH_EXECUTION is False
        without_debugger()
        assert inductor.debug is real
        """)
    run(told)


@pytest.mark.sampled(0)
def test_importing_fngraph_loads_itself_alone():
    """What else a process needs comes in with the first name that needs it."""
    told = textwrap.dedent("""
        import sys
        import torch
        before = set(sys.modules)
        import fngraph
        assert set(sys.modules) - before == {"fngraph"}, set(sys.modules) - before
        fngraph.Limits, fngraph.BatchSpec, fngraph.struct
        more = {name.partition(".")[0] for name in set(sys.modules) - before}
        assert more <= {"fngraph", *sys.stdlib_module_names}, more
        """)
    run(told)


def run(told: str) -> None:
    """In a new process."""
    ran = subprocess.run([sys.executable, "-c", told], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
