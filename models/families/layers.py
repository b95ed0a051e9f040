"""Parts of layers: norms, heads, attention, mlps, plain and gated; and the cache that layers keep.

Shape letters as in `fngraph.models.families.llama`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear, silu

import fngraph as fg
from fngraph.models.weights import naming
from fngraph.models.weights.naming import shape
from fngraph.models.weights.sharded import SplitGain
from fngraph.models.weights.splits import Each, Split, columns, rows, summed


def rms_norm(x_TE: Tensor, weight_E: Tensor | SplitGain, eps: float) -> Tensor:
    """Root-mean-square norm, computed in float32; of columns that are split, over all of them."""
    wide_TE = x_TE.float()
    mean_T1 = wide_TE.square().mean(-1, keepdim=True)
    if isinstance(weight_E, SplitGain):
        mean_T1, weight_E = weight_E.over_all(mean_T1), weight_E.weight
    return (wide_TE * torch.rsqrt(mean_T1 + eps)).to(x_TE.dtype) * weight_E


def centred_norm(x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm whose weight is added to 1, computed in float32."""
    wide_TE = x_TE.float()
    scale_T1 = torch.rsqrt(wide_TE.square().mean(-1, keepdim=True) + eps)
    return (wide_TE * scale_T1 * (1 + weight_E.float())).to(x_TE.dtype)


def swiglu(x_TE: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
    """The gated mlp; matrices as (out, in)."""
    return linear(silu(linear(x_TE, w_gate)) * linear(x_TE, w_up), w_down)


def attend(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, kv: Any, batch: Any, *,
    scale: float | None = None, window: int | None = None,
) -> tuple[Tensor, Any]:  # fmt: skip
    """Causal attention; a batch with a `prefix_len` has its shared prefix read once for all, but
    for layers with a window, which do not see all of it."""
    if hasattr(batch, "prefix_len") and window is None:
        return fg.ops.cascade(q_THD, k_TKD, v_TKD, kv, batch, scale=scale)
    return fg.ops.attention(q_THD, k_TKD, v_TKD, kv, batch, scale=scale, window=window)


def heads(x_TE: Tensor, weight: Tensor, head_dim: int, bias: Tensor | None = None) -> Tensor:
    """(T, H, D): the projection of each head; `weight` is (H*D, E), `bias` (H*D,)."""
    joined = linear(x_TE, weight, bias)
    T, HD = joined.shape
    return joined.reshape(T, HD // head_dim, head_dim)  # einops would take as long as an op


def join(x_THD: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """(T, E): all heads projected back; `weight` is (E, H*D), `bias` (E,)."""
    return linear(x_THD.flatten(1), weight, bias)


@fg.struct
class Affine:
    """A matrix (out, in) or the gain of a norm (E,), and what is added."""

    weight: Tensor
    bias: Tensor


def affine(weights: Affine, x: Tensor) -> Tensor:
    """The matrix times x, plus the bias."""
    return linear(x, weights.weight, weights.bias)


def norm(x_TE: Tensor, weights: Affine, eps: float) -> Tensor:
    """Layer norm over the last dim."""
    return layer_norm(x_TE, x_TE.shape[-1:], weights.weight, weights.bias, eps)


def matrix_of(out: int, into: int) -> Affine:
    """Shapes of a matrix and its bias."""
    return Affine(shape(out, into), shape(out))


def norm_of(dim: int) -> Affine:
    """Shapes of a layer norm."""
    return Affine(shape(dim), shape(dim))


def affine_names(ours: str, theirs: str) -> dict[str, str]:
    """What Hugging Face calls the two, for `loading.Format.names`."""
    return {f"{ours}.{part}": f"{theirs}.{part}" for part in ("weight", "bias")}


@fg.struct
class Mlp:
    """Weights of a gated mlp, matrices as (out, in)."""

    w_gate: Tensor  # (F, E)
    w_up: Tensor  # (F, E)
    w_down: Tensor  # (E, F)


def mlp(weights: Mlp, x_TE: Tensor) -> Tensor:
    """(T, E): `swiglu` with its weights as one."""
    return swiglu(x_TE, weights.w_gate, weights.w_up, weights.w_down)


def mlp_of(dim: int, hidden: int) -> Mlp:
    """Shapes of a gated mlp."""
    return Mlp(shape(hidden, dim), shape(hidden, dim), shape(dim, hidden))


def mlp_names(ours: str, theirs: str) -> dict[str, str]:
    """What Hugging Face calls the weights of a gated mlp, for `loading.Format.names`."""
    return {
        f"layers.*.{ours}.w_gate": f"model.layers.*.{theirs}.gate_proj.weight",
        f"layers.*.{ours}.w_up": f"model.layers.*.{theirs}.up_proj.weight",
        f"layers.*.{ours}.w_down": f"model.layers.*.{theirs}.down_proj.weight",
    }


def mlp_splits(ours: str, hidden: int, *, whole_sum: bool = True) -> dict[str, Split]:
    """How the weights of a gated mlp are split, for `splits.Specs`.

    Args:
        whole_sum: whether its result is the sum over all processes; False: each one's term of it.
    """
    last = summed if whole_sum else columns
    return {
        f"layers.*.{ours}.w_gate": rows(Each(hidden)),
        f"layers.*.{ours}.w_up": rows(Each(hidden)),
        f"layers.*.{ours}.w_down": last(Each(hidden)),
    }


def paired(
    layers: Sequence[Any], kept: Any, name: str = "cache",
    fix: str = "init_cache(params.config, ...) of the same model",
) -> Iterable[tuple[Any, Any]]:  # fmt: skip
    """Each layer with what is kept for it.

    Raises:
        TypeError: what has no part for each layer. ValueError: as many parts as it should not have.
    """
    fg.core.text.expect(tuple | list, fix, TypeError, **{name: kept})
    if len(kept) != len(layers):
        raise ValueError(
            f"{name} has {fg.core.text.count(len(kept), 'part')}, and the model "
            f"{fg.core.text.count(len(layers), 'layer')}. Pass {fix}"
        )
    return zip(layers, kept)


class Room(NamedTuple):
    """What a cache is made for: its parts are zeros of these sizes."""

    num_blocks: int
    block_size: int
    num_slots: int | None
    device: torch.device | str
    dtype: torch.dtype

    def pages(self, *dims: int) -> Tensor:
        """A row of `dims` for each token: (num_blocks, block_size, *dims)."""
        size = self.num_blocks, self.block_size, *dims
        return torch.zeros(size, device=self.device, dtype=self.dtype)

    def slots(self, *dims: int, dtype: torch.dtype | None = None) -> Tensor:
        """A state for each request: (num_slots, *dims)."""
        if self.num_slots is None:
            raise TypeError("init_cache: this model keeps a state a request. Pass num_slots=")
        return torch.zeros(self.num_slots, *dims, device=self.device, dtype=dtype or self.dtype)


def init_cache(
    empty: Callable[[Any, Room], Any],
    config: Any,
    num_blocks: int,
    *,
    block_size: int = 16,
    num_slots: int | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Any:
    """An empty cache: that of a family's `empty(config, room)`.

    Args:
        num_blocks, block_size: of pages, where tokens are kept.
        num_slots: of states, where requests have one; without states it is not used.

    Raises:
        TypeError: what is no config; sizes that are no numbers; no `num_slots` for a family with
            states. ValueError: sizes below 0.
    """
    naming.check_config(config, "init_cache")
    sizes = {"num_blocks": num_blocks, "block_size": block_size}
    sizes |= {"num_slots": num_slots} if num_slots is not None else {}
    fg.core.text.expect(int, "a whole number", TypeError, **sizes)
    for name, size in sizes.items():
        if size < 0:
            raise ValueError(f"{name}={size}: pass 0 or more")
    return empty(config, Room(num_blocks, block_size, num_slots, device, dtype))
