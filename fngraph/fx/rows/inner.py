"""Rows through ops that compute over some dims of each operand: pools, transforms, matrices.

    F.max_pool2d(x, 2)              # of (T, C, H, W), over H and W
    torch.fft.rfft(x)               # over the last dim
    torch.linalg.lu_factor_ex(x)    # of (T, n, n), each matrix by itself

T and R may be any other dim. What padding holds then is not known. Some of these ops raise an error
where they find what they cannot take, in padding as well: those ask what it holds.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch

from fngraph.fx.advice import valid, where_valid
from fngraph.fx.nodes import flat, is_op, is_tensor, operands
from fngraph.fx.rows.bounds import at_most, size_of
from fngraph.fx.rows.fills import is_all, pointwise, refuse_counts
from fngraph.fx.rows.indices import check_index, is_there
from fngraph.fx.rows.shapes import is_chance
from fngraph.fx.rows.state import Kept, Mixes, OpCall, is_moving, moving_dims, ndim
from fngraph.fx.rows.sums import finite_padding
from fngraph.fx.schemas import plain_name

_OVER_LAST: list[tuple[str, dict[str, int]]] = [
    (
        """avg_pool1d adaptive_avg_pool1d reflection_pad1d replication_pad1d diag_embed
        upsample_nearest1d _upsample_nearest_exact1d upsample_linear1d""",
        {"self": 1},
    ),
    (
        """avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d max_pool2d_with_indices col2im
        reflection_pad2d replication_pad2d upsample_nearest2d _upsample_nearest_exact2d
        upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa""",
        {"self": 2},
    ),
    (
        """avg_pool3d _adaptive_avg_pool3d adaptive_max_pool3d max_pool3d_with_indices im2col
        reflection_pad3d replication_pad3d upsample_nearest3d _upsample_nearest_exact3d
        upsample_trilinear3d pixel_shuffle pixel_unshuffle channel_shuffle
        native_channel_shuffle""",
        {"self": 3},
    ),
    ("grid_sampler_2d", {"input": 3, "grid": 3}),
    ("grid_sampler_3d", {"input": 4, "grid": 4}),
    (
        """_linalg_det _linalg_slogdet linalg_inv_ex linalg_lu_factor_ex linalg_lu linalg_qr
        _linalg_svd _linalg_eigh""",
        {"A": 2},
    ),
    ("linalg_cholesky_ex linalg_ldl_factor_ex linalg_eig linalg_matrix_exp", {"self": 2}),
    ("linalg_pinv", {"self": 2, "atol": 0, "rtol": 0}),
    ("cholesky_solve", {"self": 2, "input2": 2}),
    ("linalg_solve_triangular", {"self": 2, "B": 2}),
    ("linalg_householder_product", {"input": 2, "tau": 1}),
    ("_linalg_solve_ex", {"A": 2, "B": 2}),
    ("linalg_lu_solve", {"LU": 2, "pivots": 1, "B": 2}),
    ("linalg_ldl_solve", {"LD": 2, "pivots": 1, "B": 2}),
    ("lu_unpack", {"LU_data": 2, "LU_pivots": 1}),
]
_LAST = {name: over for names, over in _OVER_LAST for name in names.split()}
"""By op and argument, over how many of its last dims the op computes."""
_ALONG = {"glu": "dim", "linalg_cross": "dim", "aminmax": "dim", "rot90": "dims",
          "_fft_c2c": "dim", "_fft_r2c": "dim", "_fft_c2r": "dim"}  # fmt: skip
"""Ops that say themselves which dims they compute over; None: all."""
_CONVERGES = ("_linalg_svd", "_linalg_eigh", "linalg_eig", "linalg_pinv", "linalg_matrix_exp")
"""Ops that raise an error, or never end, for what is not finite."""
_VECTORS = {"_linalg_svd": (0, 2), "_linalg_eigh": (1,), "linalg_eig": (1,)}
"""Which results are vectors that may as well have the other sign."""
INNER = (*_LAST, *_ALONG, "renorm")


def over_dims(call: OpCall) -> Kept:
    """An op that computes over dims in which there must be no padding, and keeps the others."""
    for name, x in call.args.items():
        if is_tensor(x):
            _refuse_dims(call, x, _over(call, name, x))
    for x in operands(call.node) if call.name in _CONVERGES else ():
        moving = moving_dims(x)
        if len(moving) > 1 or not all(finite_padding(call, x, d) for d in moving):
            raise Mixes(
                f"calls {call.node.target}, which fails where a number is NaN or infinite, and "
                "that of padding may be: an error for padding alone. Let it not be: "
                f"x.nan_to_num(); or {valid(call.dim(x, moving[0]))}"
                f"{where_valid(ndim(x), moving[0], 'x', '0')}",
                fails=True,
            )
    _refuse_vectors(call)
    _refuse_pivots(call)
    return Kept()


def _over(call: OpCall, name: str, x: Any) -> Collection[int]:
    """The dims of an argument that an op computes over; all of one that nothing is said of."""
    rank, args = ndim(x), call.args
    if call.name == "renorm":
        return [d for d in range(rank) if d != args["dim"] % rank]
    if call.name in _ALONG:
        dims = args[_ALONG[call.name]]
        dims = range(rank) if dims is None else dims
        return [d % rank for d in ([dims] if isinstance(dims, int) else dims) if rank]
    last = _LAST[call.name].get(name, rank)
    if name == "B" and call.name == "_linalg_solve_ex" and ndim(args["A"]) == rank + 1:
        shapes = [[call.text(n) for n in y.meta["val"].shape] for y in (x, args["A"])]
        last = 1 if shapes[0] == shapes[1][:-1] else 2  # a vector for each matrix
    return range(max(rank - last, 0), rank)


def _refuse_dims(call: OpCall, x: Any, over: Collection[int]) -> None:
    for d in moving_dims(x):
        if d in over:
            raise Mixes(
                f"takes {call.name.strip('_')} over {call.dim(x, d)}, and a key has rows of "
                "padding there. Let T and R be other dims, in front: x.movedim(-1, 0); or return "
                "the rows, and do it outside"
            )


def _refuse_vectors(call: OpCall) -> None:
    vectors = _VECTORS.get(call.name, ())
    if not vectors or not any(map(moving_dims, operands(call.node))):
        return
    for y in call.node.users:
        if y.target is operator.getitem and y.args[1] in vectors and y.users:
            raise Mixes(
                f"takes vectors of {call.node.target}, which may as well have the other sign: "
                "which one, the number of matrices may decide. Take the values alone; or if what "
                "you make of them is the same for both, say so: fg.trust_rows(result)"
            )


def _refuse_pivots(call: OpCall) -> None:
    """Pivots are where a kernel writes: those of padding must be an op's own."""
    pivots: Any = call.args.get("pivots", call.args.get("LU_pivots"))
    if not is_tensor(pivots) or not moving_dims(pivots):
        return
    source = pivots.args[0] if pivots.op == "call_function" and not is_op(pivots) else None
    if source is None or "pivots" not in _results(source):
        raise Mixes(
            f"calls {call.node.target} with pivots of which padding may have any, and it writes "
            "where they say: the end of a process for rows of padding alone. Take them from "
            "torch.linalg.lu_factor_ex(x) or ldl_factor_ex(x) as they are",
            fails=True,
        )


def _results(source: Any) -> list[str]:
    return [r.name for r in source.target._schema.returns] if is_op(source) else []


def distances(call: OpCall) -> Kept:
    """cdist: of each row of one to each of the other."""
    rows = False
    for x in (call.args["x1"], call.args["x2"]):
        _refuse_dims(call, x, [ndim(x) - 1])
        rows |= ndim(x) - 2 in moving_dims(x)
    if rows and call.args.get("p") == 2 and not call.args.get("compute_mode"):
        raise Mixes(
            "takes cdist of T or R rows, and from 26 rows on, padding included, torch computes it "
            "by a product, which rounds much more and makes NaN of what is infinite. Say which "
            'way: torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist")'
        )
    return Kept()


def trilinear(call: OpCall) -> Kept:
    """_trilinear, of nn.Bilinear: three operands, stretched to the same dims, summed over some."""
    args = call.args
    rank = ndim(args["i1"]) + len(args["expand1"])
    for name in "123":
        x, stretched = args[f"i{name}"], args[f"expand{name}"]
        dims = [d for d in range(rank) if d not in stretched]
        _refuse_dims(call, x, [d for d, e in enumerate(dims) if e in args["sumdim"]])
    return Kept()


def bags(call: OpCall) -> Kept:
    """embedding_bag of (T, n) indices: bag i is row i. Of offsets that somebody made, who knows."""
    args = call.args
    index, offsets, weight = args["indices"], args["offsets"], args["weight"]
    extra = args.get("per_sample_weights")
    if not any(map(moving_dims, operands(call.node))):
        return Kept()
    each = _step(offsets)
    fits = each is not None and each * _size(offsets) == _size(index)
    fits &= not is_tensor(extra) or _size(extra) == _size(index)
    if not fits or moving_dims(weight) or args.get("include_last_offset"):
        raise Mixes(
            "takes bags of an embedding by offsets, of which it is not known whether they keep "
            "rows apart. Give each token as many indices: (T, n), and none more"
        )
    check_index(call, weight, 0, index, from_end=False)
    return Kept()


def _size(x: Any) -> Any:
    return size_of(x.meta["val"].shape[0])


def _step(offsets: Any) -> int | None:
    """The step of arange(0, n * T, n), whatever n and T are."""
    if not is_op(offsets) or plain_name(offsets.target) != "arange":
        return None
    args = dict(zip(("start", "end", "step"), offsets.args)) if len(offsets.args) == 3 else {}
    step = args.get("step")
    return step if args.get("start") == 0 and isinstance(step, int) and step > 0 else None


def unpooled(call: OpCall) -> Kept:
    """max_unpool: each element to where its index says, within its own image."""
    x, index, size = call.args["self"], call.args["indices"], call.args["output_size"]
    for y in (x, index):
        _refuse_dims(call, y, range(ndim(y) - len(size), ndim(y)))
    many = 1
    for n in size:
        many = many * n
    if moving_dims(index) and not is_there(call.rows(index), moving_dims(index), many, False):
        raise Mixes(
            f"puts elements where the padding of an index says ({call.name}), which may not be "
            f"among the {many} that are there: an error, or the end of a process, for rows of "
            f"padding alone. Let it be: index.clamp(0, {many - 1})",
            fails=True,
        )
    return Kept()


def taken_in_order(call: OpCall) -> Kept:
    """masked_scatter: the first elements of the source, one for each that the mask means."""
    mask, source = call.args["mask"], call.args["source"]
    given = operands(call.node)
    if not any(map(moving_dims, given)):
        return Kept()
    behind = [d for x in (call.node, source) for d in moving_dims(x) if d]
    if behind or not moving_dims(call.node):
        raise Mixes(
            "takes elements of a source in their order (masked_scatter), padding between them. "
            "Let T or R be the first dim of each, or choose: torch.where(mask, source, x)"
        )
    fills = [call.rows(mask).fills.get(d) for d in moving_dims(mask)]
    spared = bool(fills) and all(is_all(fill, 0) for fill in fills)
    if not spared and not at_most(_numel(call.value), _numel(source.meta["val"])):
        raise Mixes(
            "takes an element of a source for each that a mask means (masked_scatter), those of "
            "padding as well, and may find none: an error for rows of padding alone. Let the mask "
            f"be false there: {valid(call.dim(call.node, 0))}"
            f"{where_valid(ndim(mask), 0, 'mask', 'False')}",
            fails=True,
        )
    return Kept()


def _numel(x: torch.Tensor) -> Any:
    many: Any = 1
    for n in x.shape:
        many = many * size_of(n)
    return many


def losses(call: OpCall) -> Kept:
    """Losses of each element, or of all."""
    x = call.args["self"]
    moving = [call.dim(y, d) for y in operands(call.node) for d in moving_dims(y)]
    if moving and call.args["reduction"] != 0:
        raise Mixes(
            f"takes {call.name} over all elements, and a key has rows of padding. Take it of each, "
            'reduction="none", and divide the sum of the true ones by their number: '
            f"{valid(moving[0])}"
            f"{where_valid(ndim(x), 0, 'loss', '0')}.sum() / (valid.sum() * n)"
        )
    both = (x, call.args["target"]) if call.name == "binary_cross_entropy" else ()
    if any(moving_dims(y) and not is_chance(call, y) for y in both):
        raise Mixes(
            "takes binary_cross_entropy of what may be no chance in padding, or of such targets: "
            "an error for rows of padding alone. Use F.binary_cross_entropy_with_logits, or let "
            f"both be some there: {valid(moving[0])}{where_valid(ndim(x), 0, 'x', '0.5')}",
            fails=True,
        )
    return pointwise(call)


def among(call: OpCall) -> Kept:
    """isin: whether each element is one of some, of which none may be padding."""
    for name, x in call.args.items():
        if is_tensor(x) and name.startswith("test_element"):
            _refuse_dims(call, x, range(ndim(x)))
    return Kept()


def noisy(call: OpCall) -> Kept:
    """rrelu: a leaky ReLU, unless it trains."""
    if call.args["training"]:
        raise Mixes("draws slopes (rrelu), which are left in memory. Draw them: torch.rand_like(x)")
    return Kept()


def grid(call: OpCall) -> Kept:
    """affine_grid: of each matrix by itself, into as many grids."""
    theta, size = call.args["theta"], call.args["size"]
    _refuse_dims(call, theta, [1, 2])
    rest = [n for n in flat(size[1:]) if is_moving(n)]
    if rest or (is_moving(size[0]) and 0 not in moving_dims(theta)):
        refuse_counts(call)
    return Kept()


def scaled_product(call: OpCall) -> Kept:
    """_scaled_mm: of rows by weights. A scale for all, or for each row; weights have their own."""
    args = call.args
    _refuse_dims(call, args["self"], [1])
    scale = args["scale_a"]
    rows = moving_dims(scale) if is_tensor(scale) else ()
    if rows and (ndim(scale) != 2 or call.dim(scale, 0) != call.dim(args["self"], 0)):
        _refuse_dims(call, scale, range(ndim(scale)))
    _refuse_dims(call, scale, range(1, ndim(scale)))
    for x in operands(call.node):
        if x is not args["self"] and x is not scale:
            _refuse_dims(call, x, range(ndim(x)))
    return Kept()
