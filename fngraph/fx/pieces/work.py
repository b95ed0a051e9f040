"""What the ops of pieces and cuts do, as functions of T and R: kind, bytes, FLOPs, kernels.

Bytes are those of operands and results, each element once; of a lookup, what it finds and not the
table. An op is one kernel, a view none. A cut is counted by its primitive's own formula where there
is one below (`CUTS`), which may ask how long requests are; else by the bytes of its rows, and of
the states of its requests.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from fngraph.core.costs.launch import Count, Part
from fngraph.core.costs.roofline import Work
from fngraph.errors import SpecError
from fngraph.fx.nodes import flat, is_loop, is_op, is_size, is_tensor, operands, written_by
from fngraph.fx.pieces.collectives import is_collective
from fngraph.fx.pieces.cuts import Cut, Pieces
from fngraph.fx.schemas import COPIES, is_pointwise, named, plain_name, reads_nothing
from fngraph.fx.tracing.tracer import Graph
from fngraph.torch_facts.schemas import is_view

DECODE_TOKENS = 16
"""Tokens a request up to which attention goes by the bytes of its cache, not by its FLOPs."""

_FREE = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "_unsafe_view",
         "_reshape_alias", "lift_fresh_copy", "scalar_tensor"}  # fmt: skip
_REDUCTIONS = {"sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "prod", "any",
               "all", "var", "std", "var_mean", "std_mean", "norm", "linalg_vector_norm",
               "logsumexp", "_softmax", "_log_softmax", "softmax", "cumsum", "cumprod",
               "native_layer_norm", "_fused_rms_norm", "count_nonzero"}  # fmt: skip
_LOOKUPS = {"index", "embedding", "gather", "index_select", "take_along_dim", "take"}
_PUTS = {"index_put", "index_copy", "index_add", "scatter", "scatter_add", "slice_scatter"}
_JOINS = {"cat", "stack"}


class Term(NamedTuple):
    """A number of elements, times what each counts; dims are ints, or sympy over T and R."""

    dims: tuple[Any, ...]
    each: float


class Op(NamedTuple):
    """What one node does; see `Work`."""

    kind: str
    nbytes: tuple[Term, ...] = ()
    flops: tuple[Term, ...] = ()
    kernels: int = 1
    dtype: str = ""
    shape: tuple[Any, ...] | None = None
    called: str = ""


class At:
    """Dims at sizes, each worked out once."""

    def __init__(self, letters: Mapping[Any, str], sizes: Mapping[str, int]) -> None:
        self._values = {symbol: sizes[letter] for symbol, letter in letters.items()}
        self._known: dict[Any, int] = {}
        self.sizes = sizes

    def dim(self, dim: Any) -> int:
        """One as a number."""
        if isinstance(dim, int):
            return dim
        if dim not in self._known:
            self._known[dim] = int(dim.xreplace(self._values))
        return self._known[dim]

    def total(self, terms: Sequence[Term]) -> float:
        """The sum of some."""
        return sum(term.each * math.prod(map(self.dim, term.dims)) for term in terms)

    def nbytes(self, x: torch.Tensor) -> float:
        """Of a fake, its elements once."""
        return self.total((_term(x),))

    def work(self, op: Op) -> Work:
        """What a node does."""
        shape = None if op.shape is None else tuple(map(self.dim, op.shape))
        nbytes, flops = self.total(op.nbytes), self.total(op.flops)
        return Work(op.kind, nbytes, flops, op.kernels, op.dtype, shape, op.called)  # type: ignore[arg-type]


def counter(pieces: Pieces, graph: Graph) -> Count:
    """What the parts of a program do, of any sizes. Equal pieces are looked at once."""
    letters = graph.letters
    ops = functools.cache(lambda i: _ops(distinct[i]))
    distinct = {id(part): part.gm.graph for part in pieces.parts if not isinstance(part, Cut)}

    @functools.lru_cache(maxsize=64)
    def parts(
        piece_sizes: tuple[tuple[str, int], ...], cut_sizes: tuple[tuple[str, int], ...],
        longest: int | None,
    ) -> tuple[Part, ...]:  # fmt: skip
        at, true = At(letters, dict(piece_sizes)), At(letters, dict(cut_sizes))
        known: dict[int, Part] = {}
        for part in pieces.parts:
            if id(part) not in known:
                if isinstance(part, Cut):
                    known[id(part)] = Part((_of_cut(part, true, longest),), cut=True)
                else:
                    known[id(part)] = Part(tuple(map(at.work, ops(id(part)))))
        return tuple(known[id(part)] for part in pieces.parts)

    def count(
        piece_sizes: Mapping[str, int], cut_sizes: Mapping[str, int], longest: int | None
    ) -> tuple[Part, ...]:
        return parts(tuple(piece_sizes.items()), tuple(cut_sizes.items()), longest)

    return count


def _ops(graph: fx.Graph) -> list[Op]:
    """Of the nodes of a piece. Those in a loop count as often as it has turns: once where nobody
    knows how many it takes; of a choice the first function's do."""
    found: list[Op] = []
    for node in graph.nodes:
        if is_loop(node):
            loop: Any = node.target
            functions = loop.graphs[:1] if loop.kind == "cond" else loop.graphs
            within = [op for inner in functions for op in _ops(inner.graph)]
            found += within * (loop.turns if loop.kind == "scan" else 1)
        elif node.op == "call_function" and is_op(node) and not is_size(node):
            found.append(_op(node))
    return found


def _op(node: fx.Node) -> Op:
    func: Any = node.target
    results = [x for x in flat(node.meta.get("val")) if isinstance(x, torch.Tensor)]
    name = plain_name(func)
    if is_view(func) or name in _FREE:
        return Op("view", kernels=0)
    reads = [x.meta["val"] for x in dict.fromkeys(operands(node))]
    writes = results or [x.meta["val"] for x in written_by(node) if is_tensor(x)]
    dtype = str((reads or writes or [torch.empty(0)])[0].dtype).removeprefix("torch.")
    moved = tuple(map(_term, (*reads, *writes)))
    if (known := _PRODUCTS.get(f"{func.namespace}::{name}")) is not None:
        products = known(_values(named(func, node.args, node.kwargs)))
        flops = tuple(Term(product, 2.0) for product in products)
        *dims, times = products[0]
        shape = tuple(dims) if len(products) == 1 and times == 1 else None
        return Op("product", moved, flops, len(products), dtype, shape)
    if is_collective(node):
        return Op("collective", moved, dtype=dtype)
    if func.namespace == "fngraph":
        return Op("fused", moved, dtype=dtype)
    if name in _LOOKUPS:
        found = tuple(map(_term, (*writes, *writes, *reads[1:])))
        return Op("index", found, dtype=dtype)
    if name in _PUTS:
        return Op("index", tuple(map(_term, (*reads[1:], *reads[1:]))), dtype=dtype)
    if name in _JOINS:
        return Op("cat", moved, dtype=dtype)
    if name in _REDUCTIONS:
        return Op("reduction", moved, dtype=dtype)
    if name in ("convolution", "_convolution"):
        weight = reads[1]
        one = Term((*_dims(writes[0]), *_dims(weight)[1:]), 2.0)
        return Op("convolution", moved, (one,), 1, dtype)
    if name.startswith(("_scaled_dot_product", "scaled_dot_product")):
        q, k = reads[:2]
        one = Term((*_dims(q), _dims(k)[-2]), 4.0)
        return Op("sdpa", moved, (one,), 1, dtype)
    if reads_nothing(func) or not reads:
        return Op("pointwise", tuple(map(_term, writes)), dtype=dtype)
    if is_pointwise(func) or func in COPIES or name == "copy":
        flat_ones = all(_dims(x) == _dims(writes[0]) and x.is_contiguous() for x in reads)
        if flat_ones:
            return Op("pointwise", moved, dtype=dtype)
        wide = f"broadcast {writes[0].itemsize}"  # its kernel goes element by element
        return Op(wide, moved, dtype=dtype, called="broadcast")
    return Op("other", moved, dtype=dtype)


def _values(given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with fakes in place of nodes."""
    return {k: fx.map_arg(v, lambda n: n.meta["val"]) for k, v in given.items()}


def _dims(x: torch.Tensor) -> tuple[Any, ...]:
    return tuple(s.node.expr if isinstance(s, torch.SymInt) else s for s in x.shape)


def _term(x: torch.Tensor) -> Term:
    """Bytes of a tensor, an element that stands for several once."""
    steps = x.stride() if x.layout is torch.strided else (1,) * x.dim()
    apart = (d for d, s in zip(_dims(x), steps) if isinstance(s, torch.SymInt) or s)
    return Term(tuple(apart), float(x.itemsize))


Product = tuple[Any, Any, Any, Any]  # rows, columns, depth, how many


def _mm(a: torch.Tensor, b: torch.Tensor) -> tuple[Product]:
    *times, rows, depth = _dims(a)
    return ((rows, _dims(b)[-1], depth, math.prod(times)),)


def _linear(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> tuple[Product]:
    *rows, depth = _dims(x)
    return ((math.prod(rows), sum(_dims(w)[0] for w in weights), depth, 1),)


_PRODUCTS: dict[str, Callable[[dict[str, Any]], tuple[Product, ...]]] = {
    "aten::mm": lambda a: _mm(a["self"], a["mat2"]),
    "aten::bmm": lambda a: _mm(a["self"], a["mat2"]),
    "aten::_scaled_mm": lambda a: _mm(a["self"], a["mat2"]),
    "aten::addmm": lambda a: _mm(a["mat1"], a["mat2"]),
    "aten::baddbmm": lambda a: _mm(a["batch1"], a["batch2"]),
    "aten::linear": lambda a: _linear(a["input"], [a["weight"]]),
    "fngraph::fused_linear": lambda a: _linear(a["x"], a["weights"]),
    "fngraph::linear_side_by_side": lambda a: _linear(a["x"], a["weights"]),
    "fngraph::all_gather_matmul": lambda a: _linear(a["x"], a["weights"]),
    "fngraph::matmul_reduce_scatter_rms_norm": lambda a: _linear(a["x"], [a["w"]]),
    "fngraph::paired_linears": lambda a: (
        *_linear(a["x"], [a["weight"]]),
        *_linear(a["more"], a["weights"]),
    ),
    "fngraph::fused_linear_fp8": lambda a: _linear(a["x"], a["weights"]),
    "fngraph::scaled_linear": lambda a: _linear(a["x"], [a["weight"]]),
    "fngraph::scaled_linear_side_by_side": lambda a: _linear(a["x"], a["weights"]),
}


# --- cuts -----------------------------------------------------------------------------------------


def _of_cut(cut: Cut, at: At, longest: int | None) -> Work:
    name = cut.op.partition("::")[2]
    op = getattr(torch.ops.fngraph, name).default
    args = named(op, cut.example, {})
    known = CUTS.get(name)
    if known is not None:
        return known(args, at, longest)._replace(called=name)
    nbytes = 0.0
    written = {a.name for a in op._schema.arguments if a.alias_info and a.alias_info.is_write}
    names = [a.name for a in op._schema.arguments]
    rows = {names[place]: dim for place, dim in zip(cut.places, cut.row_dims)}
    for key, x in args.items():
        if isinstance(x, torch.Tensor):
            each = at.nbytes(x)
            is_state = rows.get(key) is None and key in written and x.dim() > 1
            nbytes += 2 * each / max(x.shape[0], 1) * at.sizes["R"] if is_state else each
    return Work(name, nbytes, dtype=_dtype(args), called=name)


def _dtype(args: Mapping[str, Any]) -> str:
    first = next((x for x in args.values() if isinstance(x, torch.Tensor)), None)
    return "" if first is None else str(first.dtype).removeprefix("torch.")


def _past(name: str, at: At, longest: int | None) -> tuple[float, float]:
    """Tokens that each request brings, and that it has."""
    brought = at.sizes["T"] / at.sizes["R"]
    if longest is None:
        raise SpecError(
            f"{name} reads the past of each request, and nobody says how long that is. Pass "
            "launch_model(constants, context=512), or BatchSpec(..., "
            "host=fg.HostBounds(max_seq_len=512))."
        )
    return brought, max(float(longest), brought)


def _seen(brought: float, has: float, causal: bool, window: int | None) -> tuple[float, float]:
    """Scores of one request and head, and keys that any of its tokens sees."""
    before = has - brought
    if window is None or has <= window:
        scores = brought * has - (brought * (brought - 1) / 2 if causal else 0.0)
        return scores, has
    if not causal:
        return brought * min(has, 2 * window - 1), min(has, brought + window - 1)
    short = min(max(window - before, 0.0), brought)  # tokens that see less than the window
    scores = short * before + short * (short + 1) / 2 + (brought - short) * window
    return scores, min(has, window + brought - 1)


def _attention(args: Mapping[str, Any], at: At, longest: int | None) -> Work:
    q, k, cache = args["q"], args["k"], args["k_cache"]
    _, H, D = _dims(q)
    K, T, R = _dims(k)[1], at.sizes["T"], at.sizes["R"]
    brought, has = _past("attention", at, longest)
    scores, keys = _seen(brought, has, args.get("causal", True), args.get("window"))
    kept = 2 * K * D * cache.itemsize
    rows = T * (2 * H * D * q.itemsize + 2 * K * D * q.itemsize + kept)
    return _scored("attention", brought, R * keys * kept + rows, 4 * H * D * scores * R, D, args)


def _mla(args: Mapping[str, Any], at: At, longest: int | None) -> Work:
    q, cache, rank = args["q"], args["cache"], args["rank"]
    (_, H, W), T, R = _dims(q), at.sizes["T"], at.sizes["R"]
    brought, has = _past("mla", at, longest)
    scores, keys = _seen(brought, has, True, None)
    rows = T * (H * (W + rank) * q.itemsize + W * (q.itemsize + cache.itemsize))
    nbytes = R * keys * W * cache.itemsize + rows
    return _scored("mla", brought, nbytes, 2 * H * (W + rank) * scores * R, rank, args)


def _varlen(args: Mapping[str, Any], at: At, longest: int | None) -> Work:
    q, R = args["q"], at.sizes["R"]
    _, H, D = _dims(q)
    each = at.sizes["T"] / R
    scores, _ = _seen(each, each, args["causal"], None)
    nbytes = sum(at.nbytes(args[name]) for name in ("q", "k", "v", "out"))
    flops = 4 * H * D * scores * R
    return Work(f"prefill attention {D}", nbytes, flops, dtype=_dtype(args))


def _scored(
    name: str, brought: float, nbytes: float, flops: float, width: int, args: Mapping[str, Any]
) -> Work:
    """Few tokens a request go by the bytes of the cache, many by their FLOPs."""
    kind = f"decode {name}" if brought <= DECODE_TOKENS else f"prefill {name} {width}"
    return Work(kind, nbytes, flops, dtype=_dtype(args))


CUTS: dict[str, Callable[[Mapping[str, Any], At, int | None], Work]] = {
    "attention": _attention, "cascade": _attention, "mla": _mla, "varlen_attention": _varlen,
}  # fmt: skip
"""Formulas of primitives, by name."""
