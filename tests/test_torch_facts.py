"""Torch's private names are in `fngraph.torch_facts` alone; and what is said there of ops, tensors.

The walk is itself checked: what it must find is planted.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fngraph.torch_facts import memory, names, schemas, symmetric

aten = torch.ops.aten
ROOT = Path(__file__).parent.parent / "fngraph"
OTHERS = {
    "_fields": "of a NamedTuple",
    "_attn_implementation": "of a configuration of transformers",
    "_can_set_attn_implementation": "of a model of transformers",
    "_can_set_experts_implementation": "of a model of transformers",
}
UNSTABLE = ("torch.fx.experimental", "torch.utils._")


def is_private(name: str) -> bool:
    """`torch._C`, `torch.utils._x`, `torch.fx.experimental`; not an op, `torch.ops.aten._x`."""
    if name.partition(".")[0] != "torch" or name.startswith("torch.ops."):
        return False
    parts = name.split(".")
    return name.startswith(UNSTABLE) or any(p[0] == "_" and p[:2] != "__" for p in parts)


def spelled(node: ast.AST, known: dict[str, str]) -> str:
    """`torch._C.f` for that expression; "" for what does not begin with an imported name."""
    if isinstance(node, ast.Attribute):
        left = spelled(node.value, known)
        return left and f"{left}.{node.attr}"
    return known.get(node.id, "") if isinstance(node, ast.Name) else ""


def private_names(source: str, own: set[str]) -> Iterator[tuple[int, str]]:
    """Lines of `source` that touch a private name of torch's, or an attribute that is not listed.

    Args:
        own: private attributes that the library itself defines.
    """
    tree = ast.parse(source)
    known = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for a in node.names:
                top = a.name.partition(".")[0]
                known[a.asname or top] = a.name if a.asname else top
            yield from ((node.lineno, a.name) for a in node.names if is_private(a.name))
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found = {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
            known |= found
            yield from ((node.lineno, name) for name in found.values() if is_private(name))
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            known[node.targets[0].id] = spelled(node.value, known)  # aten = torch.ops.aten
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            whole = spelled(node, known)
            if is_private(whole):
                yield node.lineno, whole
            elif node.attr[0] == "_" and node.attr[:2] != "__" and not whole:
                if node.attr not in own | names.ATTRIBUTES.keys() | OTHERS.keys():
                    yield node.lineno, node.attr


def defined(source: str) -> Iterator[str]:
    """Names that a file gives to attributes, methods and fields."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def sources() -> dict[str, str]:
    """The library's files but for those of the facts."""
    found = {str(p.relative_to(ROOT)): p.read_text() for p in sorted(ROOT.rglob("*.py"))}
    return {path: text for path, text in found.items() if not path.startswith("torch_facts")}


def test_private_names_of_torch_are_in_one_place():
    own = {name for text in sources().values() for name in defined(text)}
    found = [
        f"{path}:{line}: {name}"
        for path, text in sources().items()
        for line, name in private_names(text, own)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("planted", "name"),
    [
        ("import torch\ntorch._C._x()", "torch._C._x"),
        ("import torch\ntorch.cuda._sleep(1)", "torch.cuda._sleep"),
        ("import torch\ngetattr(torch._C, x)", "torch._C"),
        ("import torch._dynamo", "torch._dynamo"),
        ("import torch.fx.experimental.proxy_tensor as p", "torch.fx.experimental.proxy_tensor"),
        ("from torch import _C", "torch._C"),
        ("def f():\n    from torch.utils._pytree import tree_map", "torch.utils._pytree.tree_map"),
        ("from torch.overrides import _get_x", "torch.overrides._get_x"),
        (
            "from torch.autograd import forward_ad as f\nf._level",
            "torch.autograd.forward_ad._level",
        ),
        ("x._nobody_knows", "_nobody_knows"),
    ],
)
def test_a_planted_name_is_seen(planted: str, name: str):
    assert name in {found for _, found in private_names(planted, set())}


@pytest.mark.parametrize(
    "fine", ["import torch\ntorch.ops.aten._to_copy", "x._schema", "x._mine", "x.__dict__",
             "from torch.fx import traceback", "import torch\ntorch.nn.functional.pad(x)"]
)  # fmt: skip
def test_other_names_are_not(fine: str):
    assert list(private_names(fine, {"_mine"})) == []


def exported(path: Path) -> Iterator[str]:
    """Public names that a file of the facts makes, or imports `as` themselves."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            yield from (a.asname for a in node.names if a.asname)
        elif isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            yield ast.unparse(target)


def test_every_name_is_used():
    files = {path: path.read_text() for path in ROOT.rglob("*.py")}
    for path in (ROOT / "torch_facts").glob("*.py"):
        others = "\n".join(text for other, text in files.items() if other != path)
        public = {name for name in exported(path) if name[0] != "_"} - {"ATTRIBUTES", "aten"}
        assert {name for name in public if not re.search(rf"\b{name}\b", others)} == set()
    assert all(f".{name}" in "".join(sources().values()) for name in names.ATTRIBUTES)


# --- tensors in memory ----------------------------------------------------------------------------


def views() -> list[torch.Tensor]:
    """Small views of one storage, laid out in many ways."""
    base = torch.empty(64)
    shapes = [(), (3,), (2, 3), (0, 3), (1, 4), (3, 0)]
    return [
        base.as_strided(shape, stride, offset)
        for shape in shapes
        for stride in itertools.product((0, 1, 2, 4), repeat=len(shape))
        for offset in (0, 3, 7)
    ]


def elements(x: torch.Tensor) -> list[int]:
    """The place of each element in its storage."""
    first, strides = x.storage_offset(), x.stride()
    places = itertools.product(*map(range, x.shape))
    return [first + sum(i * s for i, s in zip(place, strides)) for place in places]


def test_a_span_goes_from_the_first_element_to_the_last():
    for x in views():
        places = elements(x)
        start, stop = memory.span(x)
        assert stop - start == 4 * memory.extent(x.shape, x.stride())
        if places:
            assert (start, stop) == (4 * min(places), 4 * max(places) + 4)
        else:
            assert start == stop


def test_tensors_overlap_where_their_spans_do():
    for a, b in itertools.product(views(), repeat=2):
        if set(elements(a)) & set(elements(b)):
            assert memory.overlap(a, b)
        elif not (elements(a) and elements(b)):
            assert not memory.overlap(a, b)


def test_a_tensor_overlaps_itself_where_two_indices_are_one_element():
    for x in views():
        places = elements(x)
        assert memory.overlaps_itself(x) or len(set(places)) == len(places)
    assert not memory.overlaps_itself(torch.empty(2, 3).t())
    assert memory.overlaps_itself(torch.empty(1).expand(3))
    assert not memory.overlaps_itself(torch.empty(0, 1).expand(0, 3))


def test_storages_are_told_apart():
    x, y = torch.empty(4), torch.empty(4)
    assert memory.storage_key(x[1:]) == memory.storage_key(x) != memory.storage_key(y)
    assert memory.storage_addresses([x, x[1:], y]) == {x.data_ptr(), y.data_ptr()}


def test_bits_are_turned_around():
    x = torch.randn(3, dtype=torch.complex64)
    both = memory.with_bits(x, True, True)
    assert both.is_conj() and both.is_neg() and torch.equal(both, -x.conj())
    back = memory.with_bits(both, both.is_conj(), both.is_neg())
    assert not back.is_conj() and not back.is_neg() and torch.equal(back, x)


# --- what schemas say -----------------------------------------------------------------------------


TWINS = {
    aten.add.Tensor: ("out",),
    aten.mm.default: ("out",),
    aten.cat.default: ("out",),
    aten.index.Tensor: ("out",),
    aten.index_put.default: ("out",),
    aten._softmax.default: ("out",),
    aten.native_layer_norm.default: ("out0", "out1", "out2"),
    aten.topk.default: ("values", "indices"),
    aten.sort.stable: ("values", "indices"),
    aten.max.dim: ("max", "max_values"),
    aten.var_mean.correction: ("out0", "out1"),
    aten.clone.default: ("out",),
    aten._to_copy.default: ("out",),
    aten.full.default: ("out",),
    aten.arange.start_step: ("out",),
    aten.zeros_like.default: ("out",),
    aten.new_zeros.default: ("out",),
    aten.constant_pad_nd.default: ("out",),
}


@pytest.mark.parametrize("op", TWINS, ids=str)
def test_the_twin_that_takes_out(op: Any):
    (twin, outs), *_ = schemas.out_twins(op)
    assert twin.overloadpacket is op.overloadpacket and outs == TWINS[op]
    assert set(schemas.inputs_of(twin)) <= set(schemas.inputs_of(op))


@pytest.mark.parametrize(
    "op", [aten._fused_rms_norm.default, aten.split.Tensor, aten.view.default], ids=str
)
def test_ops_without_one(op: Any):
    assert schemas.out_twins(op) == ()


def test_what_an_op_writes_and_what_it_views():
    x, y = torch.empty(3), torch.empty(3)
    assert schemas.written(aten.add_.Tensor, (x, y), {}) == [x]
    (out,) = schemas.written(aten.add.out, (x, x), {"out": y})
    assert out is y
    assert schemas.written(aten.add.Tensor, (x, y), {}) == []
    assert schemas.is_view(aten.view.default) and not schemas.is_view(aten.add_.Tensor)
    assert not schemas.is_view(aten.add.Tensor) and not schemas.is_view(len)


def test_memory_that_torch_lets_go_of_for_more_is_kept_for_graphs(monkeypatch: pytest.MonkeyPatch):
    """By all that are captured through it; of another group of the name it is torch's no longer."""
    room: dict[str, torch.Tensor] = {}

    def go_through(x: torch.Tensor) -> None:
        if len(x) > len(room.get("tp", ())):
            room["tp"] = torch.zeros(len(x))

    def multiply(x: torch.Tensor, *_: Any, **__: Any) -> Any:
        go_through(x)
        return x, [x]

    symm_mem = symmetric._symmetric()
    takes = str(torch.ops.symm_mem.fused_all_gather_matmul.default._schema)
    assert "(Tensor A, Tensor[] Bs, int gather_dim, str group_name, *, bool return_A" in takes
    by_blocks = inspect.signature(symm_mem._pipelined_produce_and_all2all).parameters
    assert [*by_blocks][:3] == ["chunk_producer", "output", "group_name"]
    assert by_blocks["out_chunk_dim"].default == 0
    monkeypatch.setattr(symm_mem, "_group_name_to_workspace_tensor", room)
    monkeypatch.setattr(
        symm_mem, "_pipelined_produce_and_all2all", lambda fn, out, group: go_through(out)
    )
    ops = SimpleNamespace(fused_all_gather_matmul=multiply)
    monkeypatch.setattr(torch.ops, "symm_mem", ops)
    kept: list[Any] = []
    for rows, captures in ((2, True), (4, False), (6, True), (5, True), (8, False)):
        monkeypatch.setattr(symmetric, "is_capturing", partial(bool, captures))
        x = torch.ones(rows, 1)
        symmetric.matmul_all_to_all(x, x, 1, "tp", kept)
        symmetric.all_gather_matmul(x, [x], "tp", kept)
    assert [len(one) for one in kept] == [2, 6]
    symmetric.forget_workspace("tp")
    assert not room
    symmetric.forget_workspace("tp")
