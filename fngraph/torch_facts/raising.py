"""Which ops may raise an error over the values that they are given, which no rule for fakes shows.

Found by calling the samples of each of torch's own op tests on a CPU with numbers that fit nothing
(torch 2.13), and by hand where there are none. An op of a library's may raise whatever it likes.
"""

from __future__ import annotations

from typing import Any

import torch

_TORCHS = ("aten", "prims", "_c10d_functional", "symm_mem", "inductor", "fngraph")
_NAMES = frozenset(
    """
    index index_select index_put _index_put_impl index_copy index_fill index_add index_reduce
    gather scatter scatter_add scatter_reduce take put masked_scatter embedding embedding_bag
    _embedding_bag _embedding_bag_forward_only embedding_dense_backward repeat_interleave
    searchsorted segment_reduce lu_unpack max_unpool2d max_unpool3d nll_loss_forward
    nll_loss2d_forward nll_loss_backward nll_loss2d_backward multi_margin_loss
    multilabel_margin_loss_forward binary_cross_entropy _ctc_loss bincount histc histogram
    _histogramdd_bin_edges _histogramdd_from_bin_cts as_strided linspace normal bernoulli
    multinomial cholesky linalg_pinv linalg_lu_solve linalg_lstsq _linalg_svd _linalg_eigh
    linalg_eig linalg_eigvals _linalg_eigvals
    """.split()
)
_OF_INTEGERS = frozenset("div floor_divide remainder fmod pow".split())
"""What divides by zero, or has no power, among integers alone."""


def may_raise(func: Any, value: Any) -> bool:
    """Whether a call of an op may raise for some values of its arguments, with a CPU's kernel.

    Args:
        value: what it gives, as a fake.
    """
    space, _, name = func._schema.name.partition("::")
    if space not in _TORCHS:
        return True
    name = name.removesuffix("_")
    whole = isinstance(value, torch.Tensor) and not (
        value.is_floating_point() or value.is_complex()
    )
    return name in _NAMES or (name in _OF_INTEGERS and whole)
