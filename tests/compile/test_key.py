"""Stale attempts: whatever may change the code that is made of a piece changes the key of its
artefact. Nothing is compiled here; `test_cache.py` has the same end to end."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import json
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor
import toys
from test_graphify import graphified

import fngraph as fg
from fngraph.compile import key
from fngraph.compile.key import FLAGS, PLACES, can_be_told, digest_of, facts_of
from fngraph.compile.results import plan_of
from fngraph.core import Range, Span
from fngraph.torch_facts import sources
from fngraph.torch_facts.names import get_precision, set_precision
from fngraph.torch_facts.portable import op_source, settings
from fngraph.torch_facts.sources import text_of

ROOT = Path(__file__).parents[2]
ALL = Range(Span(1, 16), Span(1, 4))
PASSES = (("norm", "1"), ("silu", "1"))
PARAMS = {"w": torch.linspace(-1, 1, toys.V * toys.E).view(toys.V, toys.E)}


def times(factor: float) -> Callable[..., Any]:
    def row(params: Any, state: Any, batch: toys.Batch) -> Any:
        return torch.tanh(params["w"][batch.token_ids]) * factor, state

    return row


TWICE = times(2.0)


@dataclasses.dataclass(frozen=True)
class Case:
    """What an artefact is made of, and the state of torch that it is made under."""

    fn: Callable[..., Any] = TWICE
    params: Any = dataclasses.field(default_factory=lambda: PARAMS)
    passes: tuple[tuple[str, str], ...] = PASSES
    part: Range = ALL
    environment: tuple[tuple[str, str], ...] = (("HOME", "/home/me"),)
    under: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

    def facts(self) -> dict[str, str]:
        fast = graphified(self.fn, donate=1, stage="batch")
        (piece,) = fast.trace(self.params, {"calls": torch.zeros(1)}).split().distinct
        plan: Any = plan_of(piece.gm)
        with self.under():
            return facts_of(
                piece.key, plan.gm, plan.inputs, self.part, self.passes, dict(self.environment)
            )


@contextlib.contextmanager
def set_to(read: Callable[[], Any], write: Callable[[Any], None], value: Any) -> Iterator[None]:
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


def precision() -> contextlib.AbstractContextManager[None]:
    return set_to(
        lambda: get_precision("mkldnn", "matmul"),
        lambda value: set_precision("mkldnn", "matmul", value), "bf16",
    )  # fmt: skip


def default_dtype() -> contextlib.AbstractContextManager[None]:
    return set_to(torch.get_default_dtype, torch.set_default_dtype, torch.float64)


def threads() -> contextlib.AbstractContextManager[None]:
    return set_to(torch.get_num_threads, torch.set_num_threads, torch.get_num_threads() + 1)


def inductor(name: str, value: Any) -> Any:
    import torch._inductor.config

    return torch._inductor.config.patch(name, value)


def env(**flags: str) -> Case:
    return Case(environment=(("HOME", "/home/me"), *flags.items()))


def halves(params: Any, state: Any, batch: toys.Batch) -> Any:
    return torch.sinh(params["w"][batch.token_ids]) * 2.0, state


STALE = {
    "a constant": (Case(times(2.0000000000000004)), "piece"),
    "an op": (Case(halves), "piece"),
    "a dtype": (Case(params={"w": PARAMS["w"].double()}), "piece"),
    "a shape": (Case(params={"w": PARAMS["w"][:-1].clone()}), "piece"),
    "a stride": (Case(params={"w": PARAMS["w"].t().contiguous().t()}), "piece"),
    "a pass gone": (Case(passes=PASSES[:1]), "passes"),
    "a pass's version": (Case(passes=(PASSES[0], ("silu", "2"))), "passes"),
    "a pass's name": (Case(passes=(PASSES[0], ("gelu", "1"))), "passes"),
    "passes in another order": (Case(passes=PASSES[::-1]), "passes"),
    "a range of T": (Case(part=Range(Span(1, 8), Span(1, 4))), "range"),
    "a range of R": (Case(part=Range(Span(1, 16), Span(1, 3))), "range"),
    "an exact size": (Case(part=ALL.at(4)), "range"),
    "a flag of Inductor": (env(TORCHINDUCTOR_MAX_AUTOTUNE="1"), "flag TORCHINDUCTOR_MAX_AUTOTUNE"),
    "a flag of Triton": (env(TRITON_F32_DEFAULT="ieee"), "flag TRITON_F32_DEFAULT"),
    "a flag of the kernels": (env(NVIDIA_TF32_OVERRIDE="0"), "flag NVIDIA_TF32_OVERRIDE"),
    "matmul precision": (Case(under=precision), "ambient"),
    "the default dtype": (Case(under=default_dtype), "ambient"),
    "autocast": (Case(under=functools.partial(torch.autocast, "cpu")), "ambient"),
    "determinism": (
        Case(under=lambda: set_to(torch.are_deterministic_algorithms_enabled,
                                  torch.use_deterministic_algorithms, True)), "ambient",
    ),
    "Inductor's settings": (
        Case(under=lambda: inductor("epilogue_fusion", False)), "torch._inductor.config",
    ),
    "a pass put into Inductor": (
        Case(under=lambda: inductor("post_grad_custom_post_pass", plus)), "torch._inductor.config",
    ),
    "a private setting of Inductor's": (
        Case(under=lambda: inductor("_micro_pipeline_tp", True)), "torch._inductor.config",
    ),
    "threads that code is made for": (Case(under=threads), "devices"),
}  # fmt: skip


@pytest.fixture(scope="module")
def base() -> dict[str, str]:
    return Case().facts()


@pytest.mark.parametrize("what", STALE)
def test_no_stale_artefact_is_found(base: dict[str, str], what: str):
    case, fact = STALE[what]
    facts = case.facts()
    assert fact in {name for name in facts if facts[name] != base.get(name)}
    assert digest_of(facts) != digest_of(base)


@pytest.mark.parametrize("name", ["post_grad_custom_post_pass", "custom_partitioner_fn"])
def test_a_pass_of_inductor_s_is_told_by_its_uuid(name: str):
    """The one that torch leaves out of what it saves, and one that it does not."""

    class Mine:
        def __init__(self, version: str | None) -> None:
            self.version = version

        def __call__(self, graph: Any) -> None: ...

        def uuid(self) -> str | None:
            return self.version

    def under(version: str | None) -> dict[str, str]:
        with inductor(name, Mine(version)):
            return settings()

    assert under("1") == under("1") != under("2")
    assert under(None) == under(None) not in (under("1"), settings())


@pytest.mark.parametrize(
    "case",
    [Case(), Case(times(2.0)), env(HOME="/elsewhere"), env(TORCHINDUCTOR_CACHE_DIR="/tmp/x"),
     Case(params={"w": PARAMS["w"] + 1}), Case(under=torch.no_grad),
     Case(under=torch.inference_mode)],
)  # fmt: skip
def test_what_changes_no_code_changes_no_key(base: dict[str, str], case: Case):
    assert case.facts() == base


@pytest.mark.parametrize(
    "name", ["torch", "triton", "cuda", "python", "fngraph", "devices", "code", "inputs"]
)
def test_what_else_code_depends_on_is_told(base: dict[str, str], name: str):
    assert base[name] and digest_of(base | {name: "other"}) != digest_of(base)


def every_key() -> dict[str, dict[str, str]]:
    """The facts of each piece of some models, for a range and for one token."""
    from test_compiled import lowered, model, tiny_llama

    lows = {
        "attend": lowered(model("attend"), modes="NONE"),
        "llama": lowered(tiny_llama("cpu"), modes="NONE", donate="cache", passes="all"),
    }
    found = {}
    for name, low in lows.items():
        passes = [one.key for one in low.split.traced.options.passes_in_order]
        for i, piece in enumerate(low.split.distinct):
            plan: Any = plan_of(piece.gm)
            for part in (ALL, ALL.at(1)):
                facts = facts_of(piece.key, plan.gm, plan.inputs, part, passes)
                found[f"{name}, piece {i} for {part}"] = facts
    return found


FRESH = """
import json, os, sys
sys.path[:0] = ["tests", "tests/compile"]
os.environ["FNGRAPH_CACHE"] = "off"
import torch
torch.set_num_threads(int(sys.argv[2]))
from test_key import every_key
if sys.argv[1] == "after a compilation":
    from test_compiled import lowered, rows_model
    lowered(rows_model(), modes="NONE").compile()
print(json.dumps(every_key()))
"""


@pytest.mark.sampled(0)
def test_every_process_finds_the_same_keys():
    """Whatever its hash seed, and whatever was imported or compiled before."""
    here = every_key()
    processes = {
        state: subprocess.Popen(
            [sys.executable, "-c", FRESH, state, str(torch.get_num_threads())], cwd=ROOT,
            stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONHASHSEED": str(seed)},
        )
        for seed, state in enumerate(("at once", "after a compilation"))
    }  # fmt: skip
    for state, process in processes.items():
        there = json.loads(process.communicate()[0])
        assert len(there) == len(here) > 8
        for name, facts in here.items():
            assert {n for n in facts if facts[n] != there[name][n]} == set(), (state, name)


def test_what_inductor_sets_in_the_environment_is_known():
    """A flag that is set while something is compiled is another key for what comes after it."""
    known = {
        *PLACES,
        "TRITON_PTXAS_PATH", "TRITON_LIBDEVICE_PATH",  # by `settle_environment`
        "CUBLAS_WORKSPACE_CONFIG",  # where `fx_passes_numeric_check` asks for it, in its settings
    }  # fmt: skip
    sources = (path.read_text() for path in Path(torch._inductor.__file__).parent.rglob("*.py"))
    written = re.findall(r'os\.environ(?:\[|\.setdefault\()"(\w+)"\] = ', "\n".join(sources))
    flags = {name for name in written if name.startswith(FLAGS)}
    assert flags <= known and "TRITON_PTXAS_PATH" in flags


def test_a_function_mode_cannot_be_told():
    class Counting(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with torch.device("cpu"):
        assert can_be_told("cpu")
    with Counting():
        assert not can_be_told("cpu")


# --- the Python behind an op ----------------------------------------------------------------------


def define(name: str, body: Callable[..., Any], fake: Callable[..., Any] | None = None) -> Any:
    op = torch.library.custom_op(f"test_key::{name}", body, mutates_args=())
    if fake is not None:
        op.register_fake(fake)
    return getattr(torch.ops.test_key, name).default


def body_of(factor: float) -> Callable[..., Any]:
    def body(x: torch.Tensor) -> torch.Tensor:
        return x * factor

    return body


def plus(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def test_an_op_s_source_is_its_code_and_what_it_holds():
    two, again, three = (define(f"op{i}", body_of(f)) for i, f in enumerate((2.0, 2.0, 3.0)))
    sources = [op_source(op).partition("\n")[2] for op in (two, again, three)]
    assert sources[0] == sources[1] != sources[2] and sources[0]
    assert op_source(torch.ops.aten.tanh.default) == str(torch.ops.aten.tanh.default._schema)


@pytest.mark.parametrize("name", ["decomposition", "lowering"])
def test_what_inductor_puts_in_an_op_s_place_is_its_source_too(name: str, monkeypatch):
    """Where the table is not loaded, nobody has put anything there: the key of torch's own."""
    op, module = torch.ops.aten.tanh.default, f"torch._inductor.{name}"

    def under(table: dict[Any, Any]) -> str:
        monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(**{f"{name}s": table}))
        return op_source(op)

    torchs = under({op: torch.nn.functional.relu})
    mine, other = (under({op: body_of(factor)}) for factor in (2.0, 3.0))
    monkeypatch.delitem(sys.modules, module)
    assert op_source(op) == torchs and module not in sys.modules
    assert len({torchs, mine, other}) == 3


def as_wide(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


def as_narrow(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[:1])


IN_LIBRARY = torch.library.Library("test_key_library", "DEF")


def with_rule(number: int, fake: Callable[..., Any]) -> Any:
    """An op that a `Library` defines, as ours are."""
    IN_LIBRARY.define(f"op{number}(Tensor x) -> Tensor")
    IN_LIBRARY.impl(f"op{number}", plus, "CompositeExplicitAutograd")
    torch.library.register_fake(f"test_key_library::op{number}", fake, lib=IN_LIBRARY)
    return getattr(torch.ops.test_key_library, f"op{number}").default


def with_kernel(number: int, kernel: Callable[..., Any]) -> Any:
    """An op with another implementation on the CPU."""
    op = torch.library.custom_op(f"test_key::on_cpu{number}", plus, mutates_args=())
    op.register_kernel("cpu")(kernel)
    return getattr(torch.ops.test_key, f"on_cpu{number}").default


@pytest.mark.parametrize(
    ("make", "bodies"),
    [
        (with_rule, (as_wide, as_wide, as_narrow)),
        (lambda i, fake: define(f"ruled{i}", plus, fake), (as_wide, as_wide, as_narrow)),
        (with_kernel, (body_of(2.0), body_of(2.0), body_of(3.0))),
    ],
    ids=["a rule for fakes", "that of a custom op", "a kernel of one device"],
)
def test_what_torch_holds_behind_a_wrapper_is_a_part_of_it(make: Any, bodies: Any):
    ops = [make(i, body) for i, body in enumerate(bodies)]
    first, again, other = (op_source(op).partition("\n")[2] for op in ops)
    assert first == again != other and first


@pytest.mark.parametrize(
    "file",
    ["ops/fused.py", "ops/fused_linear.py", "ops/paired_linears.py",
     "ops/triton/products/skinny.py", "ops/triton/products/wide.py", "compile/few_rows.py",
     "ops/fused_linear_fp8.py", "ops/triton/products/skinny_fp8.py",
     "torch_facts/inductor.py", "core/compiling.py"],
)  # fmt: skip
def test_our_own_source_is_a_part_of_every_key(base: dict[str, str], monkeypatch, file: str):
    """Torch cannot say what a `Library` was given, and what is taken apart is written out."""
    read = Path.read_bytes
    edited = Path(fg.__file__).parent / file
    assert edited.exists()
    monkeypatch.setattr(Path, "read_bytes", lambda path: read(path) + b"#" * (path == edited))
    key.own_source.cache_clear()
    facts = Case().facts()
    key.own_source.cache_clear()
    assert {name for name in facts if facts[name] != base[name]} == {"fngraph"}


def through_op(params: Any, state: Any, batch: toys.Batch) -> Any:
    return fg.trust_rows(torch.ops.test_key.same(params["w"][batch.token_ids])), state


def test_another_source_of_an_op_is_another_key():
    found = []
    for factor in (2.0, 2.0, 3.0):
        define("same", body_of(factor), torch.empty_like)
        found.append(Case(through_op).facts())
    first, again, other = found
    assert first == again and digest_of(first) != digest_of(other)
    assert {name for name in first if first[name] != other[name]} == {"ops"}


SCALE = 2


def scaled(x: Any) -> Any:
    return helper(x) * SCALE


def helper(x: Any) -> Any:
    return x + 1


@pytest.mark.parametrize("name, value", [("SCALE", 3), ("helper", plus)])
def test_a_function_s_text_has_what_it_looks_up(monkeypatch, name: str, value: Any):
    before = text_of(scaled)
    assert before == text_of(scaled)
    monkeypatch.setitem(globals(), name, value)
    assert text_of(scaled) != before


def test_a_function_s_text_has_its_file(tmp_path, monkeypatch):
    file = tmp_path / "some_kernels.py"
    monkeypatch.syspath_prepend(tmp_path)
    file.write_text("def f(x):\n    return x\n")
    import some_kernels

    before = text_of(some_kernels.f)
    file.write_text("def f(x):\n    return x\n\ndef g(x):\n    return 2\n")
    assert text_of(some_kernels.f) != before


HELD = """
import dataclasses, enum
import torch

class Kind(enum.Enum):
    ONE, TWO = 1, 2

@dataclasses.dataclass
class Options:
    factor: int = 1

@dataclasses.dataclass(slots=True)
class Slotted:
    factor: int = 1

class Tuned:
    def __init__(self, fn):
        self.fn = fn
        self.self = self

def one(x): return x
def two(x): return x + 1
"""
CHANGES = {  # what a function reads, before and after
    "an object": ("Options(1)", "Options(2)"),
    "one with slots": ("Slotted(1)", "Slotted(2)"),
    "a name of a few": ("Kind.ONE", "Kind.TWO"),
    "a set": ("{1, 2}", "{1, 3}"),
    "a tensor": ("torch.ones(2)", "torch.zeros(2)"),
    "what holds a function": ("Tuned(one)", "Tuned(two)"),
    "a class": ("Options", "Slotted"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_function_s_text_has_what_is_in_what_it_holds(what: str):
    space: dict[str, Any] = {"__name__": "test_key_held"}
    sys.modules["test_key_held"] = types.ModuleType("test_key_held")
    try:
        exec(HELD + "def read(): return held", space)
        texts = []
        for told in (*CHANGES[what], CHANGES[what][0]):
            space["held"] = eval(told, space)
            texts.append(text_of(space["read"]))
    finally:
        del sys.modules["test_key_held"]
    assert texts[0] == texts[2] != texts[1]


def test_a_function_s_text_has_what_it_finds_in_modules(tmp_path, monkeypatch):
    """`kernels.helper(x)`, in a module of a package, which has another from a third."""
    package = tmp_path / "my_kernels"
    package.mkdir()
    package.joinpath("__init__.py").write_text("from my_kernels import inner, others\n")
    package.joinpath("inner.py").write_text(
        "import my_kernels\ndef helper(x):\n    return my_kernels.others.last(x)\n"
    )
    others = package / "others.py"
    others.write_text("def last(x):\n    return x * 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    import my_kernels

    space = {"my_kernels": my_kernels}
    exec("def body(x): return my_kernels.inner.helper(x)", space)
    before = text_of(space["body"])
    others.write_text("def last(x):\n    return x * 3\n")
    assert text_of(space["body"]) != before
    others.write_text("def last(x):\n    return x * 2\n")
    assert text_of(space["body"]) == before


@pytest.mark.parametrize(
    "told",
    [
        "from lazy_kernels.inner import helper",
        "from lazy_kernels import inner",
        "import lazy_kernels.inner as inner",
        "from .inner import helper",
    ],
)
def test_a_function_s_text_has_what_it_imports_as_it_runs(tmp_path, monkeypatch, told: str):
    package = tmp_path / "lazy_kernels"
    package.mkdir()
    package.joinpath("__init__.py").write_text("")
    inner = package / "inner.py"
    inner.write_text("def helper(x):\n    return x * 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("lazy_kernels", "lazy_kernels.inner"):
        sys.modules.pop(name, None)  # another case's
    space: dict[str, Any] = {"__package__": "lazy_kernels"}
    exec(f"def body(x):\n    def then():\n        {told}\n    return then", space)
    before = text_of(space["body"])
    importlib.import_module("lazy_kernels.inner")
    assert text_of(space["body"]) == before  # whether it is loaded or not
    inner.write_text("def helper(x):\n    return x * 3\n")
    assert text_of(space["body"]) != before


CALLS = {  # how a function comes to one of `fngraph.models`
    "the function": ("from fngraph.models.families.rope import rotate", "rotate(x, x)"),
    "its module": ("from fngraph.models.families import rope", "rope.rotate(x, x)"),
    "a family": ("from fngraph.models import llama", "llama.forward(x, x, x)"),
    "a class": ("from fngraph.models.families.rope import Linear", "Linear(x)"),
    "the package": ("from fngraph import models", "models.llama.forward(x, x, x)"),
    "fngraph": ("import fngraph as fg", "fg.models.llama.forward(x, x, x)"),
    "fngraph as it runs": ("", "import fngraph as fg; fg.models.llama.forward(x, x, x)"),
    "an import as it runs": ("", "from fngraph.models import llama; llama.forward(x, x, x)"),
}


@pytest.mark.parametrize("how", CALLS)
def test_a_function_s_text_has_the_models_that_it_calls(monkeypatch, how: str):
    """They are source of ours, and of no key but this."""
    read = Path.read_bytes
    told, body = CALLS[how]
    space: dict[str, Any] = {"__name__": "test_key_calls"}
    exec(f"{told}\ndef call(x):\n    {body}", space)

    def text(edited: tuple[str, ...]) -> str:
        monkeypatch.setattr(
            Path, "read_bytes", lambda path: read(path) + b"#" * (path.parts[-3:] == edited)
        )
        sources._models_hash.cache_clear()
        return text_of(space["call"])

    before = text(())
    assert text(("models", "families", "rope.py")) != before == text(("fngraph", "fx", "nodes.py"))
    sources._models_hash.cache_clear()


def test_a_function_s_text_has_the_numbers_of_what_it_holds_of_ours():
    def of(held: Any) -> str:
        return text_of(lambda x: x * held.max_tokens)

    assert of(fg.Limits(8, 4)) == of(fg.Limits(8, 4)) != of(fg.Limits(9, 4))


TWO_KERNELS = """
import triton
@triton.jit
def add_one(x):
    return x + 1
@triton.jit
def add_two(x):
    return x + 2
"""


def test_a_kernel_behind_an_autotuner_is_a_part_of_the_text(tmp_path, monkeypatch):
    """`triton.Config`s too, wherever they are written."""
    triton = pytest.importorskip("triton")
    tmp_path.joinpath("two_kernels.py").write_text(TWO_KERNELS)
    monkeypatch.syspath_prepend(tmp_path)
    from two_kernels import add_one, add_two

    def tuned(kernel: Any, warps: int) -> str:
        held = triton.autotune([triton.Config({}, num_warps=warps)], key=[])(kernel)
        return text_of(lambda: held)

    assert tuned(add_one, 4) == tuned(add_one, 4)
    assert len({tuned(add_one, 4), tuned(add_two, 4), tuned(add_one, 8)}) == 3
