"""Which rule an op goes by: one table, and what becomes of an op that is not in it."""

from __future__ import annotations

import math
from collections.abc import Callable

from fngraph.fx.nodes import flat, operands
from fngraph.fx.rows import indices, inner, shapes, sums, writes
from fngraph.fx.rows.fills import WIDE, dtype_of, is_smooth, pointwise, refuse_counts
from fngraph.fx.rows.ranks import COLLECTIVES, over_ranks
from fngraph.fx.rows.state import VOUCHED, Kept, Mixes, OpCall, is_moving, moving_dims, ndim
from fngraph.fx.schemas import is_pointwise


def rule(call: OpCall) -> Kept:
    """The rule of the op. One that is not known keeps rows if it sees none of T and R."""
    known = rule_of(call)
    if known is not None:
        if known not in _COUNTING:
            refuse_counts(call)
        return known(call)
    if is_primitive(call):  # they take care of padding themselves
        for x in operands(call.node) if call.name in _OVER_FEATURES else ():
            if ndim(x) - 1 in moving_dims(x):
                raise Mixes(
                    f"calls {call.node.target} over {call.dim(x, ndim(x) - 1)} features, of which "
                    "a key has more. Let tokens and requests be rows: (T, E)"
                )
        return Kept()
    moving = any(moving_dims(x) for x in operands(call.node))
    if not moving and not any(map(is_moving, flat(call.args))):
        return Kept()
    raise Mixes(
        f"calls {call.node.target}, of which it is not known whether it keeps rows apart. If row i "
        "of its result depends on row i alone, say so, of it or of a call around it: "
        f"{VOUCHED}"
    )


def keeps_finite(call: OpCall) -> bool:
    """Whether an op of weights gives what is taken to be finite, as they are."""
    fn = _RULES.get(call.name)
    dtype = dtype_of(call)
    if not (dtype.is_floating_point or dtype.is_complex):
        return True
    if fn in _MOVES or call.name in _MOVED:
        return "dtype" not in call.args  # other bits
    if fn is sums.norm:
        return sums.is_safe(call)
    if dtype not in WIDE:
        return False
    if fn is pointwise or is_pointwise(call.node.target):  # type: ignore[arg-type]
        return is_smooth(call)
    numbers = all(math.isfinite(x) for x in call.args.values() if isinstance(x, float))
    return numbers and (fn in _SUMMED or call.name in _ADDED)


def rule_of(call: OpCall) -> Callable[[OpCall], Kept] | None:
    """The function that has the op's rule; None for an op that is not known."""
    if _namespace(call) == "aten" and call.name in _RULES:
        return _RULES[call.name]
    if is_primitive(call) and call.name in COLLECTIVES:
        return over_ranks
    by_element = is_pointwise(call.node.target)  # type: ignore[arg-type]
    return pointwise if by_element and not is_primitive(call) else None


def is_primitive(call: OpCall) -> bool:
    """Whether the op is one that a backend runs."""
    return _namespace(call) == "fngraph"


def _namespace(call: OpCall) -> str:
    return str(call.node.target.namespace)  # type: ignore[union-attr]


_COUNTING = {shapes.in_order, shapes.reshape, shapes.cut, shapes.parts, shapes.pad, shapes.filled,
             shapes.repeat, shapes.drawn, shapes.embedded, writes.window, sums.norm,
             inner.grid}  # fmt: skip
"""Rules that look at numbers of T and R themselves."""
_OVER_FEATURES = frozenset(
    """rms_norm add_rms_norm all_reduce_rms_norm reduce_scatter_rms_norm
    matmul_reduce_scatter_rms_norm gather_rows all_gather_matmul rms_norm_fp8 rms_norm_fp8_rows
    add_rms_norm_fp8 add_rms_norm_fp8_rows silu_mul_fp8_rows quantize_fp8_rows rope norm_rope
    linear_side_by_side scaled_linear scaled_linear_side_by_side fused_linear
    paired_linears fused_linear_fp8 row_max""".split()
)
"""Ops of ours that compute over the last dim of each operand."""
_MOVES = {shapes.in_order, shapes.permute, shapes.reshape, shapes.cut, shapes.parts, shapes.join,
          shapes.diagonal, shapes.repeat, indices.read, sums.order, sums.lower}  # fmt: skip
_MOVED = frozenset(
    """flip roll triu unfold repeat_interleave amax amin max min cummax cummin _softmax
    softmax all_gather all_to_all""".split()
)
"""Rules and ops that give elements of their operands, or none above 1: as finite as these."""
_SUMMED = {sums.product, sums.convolution, shapes.pad}
_ADDED = frozenset(
    """sum mean cumsum _log_softmax logsumexp zeros_like ones_like full_like new_zeros new_ones
    new_full zero fill all_reduce reduce_scatter""".split()
)
"""Those that add up, or make numbers: finite as far as the dtype goes."""


_RULES: dict[str, Callable[[OpCall], Kept]] = {
    name: fn
    for fn, names in {
        pointwise: """_to_copy copy fill zero floor_divide polar complex scalar_tensor
            masked_fill clone where hardswish log_sigmoid_forward _prelu_kernel""",
        shapes.in_order: """unsqueeze squeeze expand alias detach lift_fresh lift_fresh_copy
            contiguous view_as_real view_as_complex real imag _conj _neg_view resolve_conj
            resolve_neg""",
        shapes.permute: "permute t transpose numpy_T",
        shapes.reshape: "view _unsafe_view reshape _reshape_alias",
        shapes.cut: "slice select narrow",
        shapes.parts: """split split_with_sizes unbind chunk unsafe_split unsafe_split_with_sizes
            unsafe_chunk split_copy split_with_sizes_copy unbind_copy""",
        shapes.join: "cat stack",
        shapes.embedded: "slice_backward select_backward",
        shapes.diagonal: "diagonal",
        shapes.pad: "constant_pad_nd",
        shapes.filled: """zeros ones full empty arange zeros_like ones_like full_like empty_like
            new_zeros new_ones new_full new_empty empty_strided new_empty_strided eye""",
        shapes.repeat: "repeat",
        shapes.drawn: """rand randn randint rand_like randn_like randint_like bernoulli normal
            uniform exponential geometric cauchy log_normal random native_dropout multinomial""",
        sums.reduction: " ".join(sums.NEUTRAL),
        sums.order: "sort argsort topk",
        sums.never: """mean var std var_mean std_mean median nanmedian mode kthvalue flip roll msort
            unfold""",
        sums.running: "cumsum cumprod cummax cummin logcumsumexp triu repeat_interleave",
        sums.lower: "tril",
        sums.cross_entropy: "nll_loss_forward nll_loss2d_forward",
        sums.product: "mm bmm addmm baddbmm mv addmv dot matmul linear _int_mm",
        sums.norm: """native_layer_norm _fused_rms_norm native_group_norm native_batch_norm
            _native_batch_norm_legit _native_batch_norm_legit_no_training cudnn_batch_norm
            _native_batch_norm_legit_functional _batch_norm_with_update _batch_norm_no_update""",
        sums.convolution: "convolution",
        sums.scaled_dot_product: """_scaled_dot_product_flash_attention
            _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention
            _scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable""",
        indices.read: "index _unsafe_index index_select gather embedding",
        indices.search: "searchsorted bucketize",
        inner.over_dims: " ".join(inner.INNER),
        inner.distances: "_cdist_forward _euclidean_dist",
        inner.trilinear: "_trilinear",
        inner.bags: "_embedding_bag_forward_only _embedding_bag",
        inner.unpooled: "max_unpool2d max_unpool3d",
        inner.taken_in_order: "masked_scatter",
        inner.losses: """mse_loss huber_loss smooth_l1_loss soft_margin_loss binary_cross_entropy
            binary_cross_entropy_with_logits""",
        inner.among: "isin",
        inner.noisy: "rrelu_with_noise",
        inner.grid: "affine_grid_generator",
        inner.scaled_product: "_scaled_mm",
        writes.write: " ".join(writes.WRITES),
        writes.window: "slice_scatter select_scatter",
    }.items()
    for name in names.split()
}
