"""The attention of a transformers model, as `fg.ops.attention` over a paged cache.

transformers calls a registered function once a layer, with that layer's q, k and v, its own
options (scale, soft cap) and every keyword argument that `model(...)` was given. So what the
interface has no word for, the cache and the batch, comes in as one keyword argument, an
`Attending` made for one call of the model; nothing is kept anywhere else.

Masks are registered too: in place of a tensor a layer gets the rule that its mask was to be made
from, and the window is read off that rule. What a layer may see is thus what the model's own mask
says, where models differ in whether they also tell the attention function.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fngraph.errors import ModelError
from fngraph.ops import attention
from fngraph.torch_facts.names import without_modes

NAME = "fngraph"  # of the implementation, and of the keyword argument that carries an `Attending`

# keyword arguments that change nothing in what attention computes
_HARMLESS = {
    "position_ids", "position_embeddings", "cache_position", "use_cache", "past_key_values",
    "output_attentions", "output_hidden_states", "output_router_logits", "return_dict",
    "sliding_window",
}  # fmt: skip


class Layer(NamedTuple):
    """What one attention call keeps in the cache.

    Attributes:
        module: the attention module that made the call.
    """

    module: Any
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class Mask:
    """A mask as its rule: `sees(batch, head, query, key)` over broadcast index tensors.

    A model that computes with it, as with the tensor that it was to be, is refused.
    """

    sees: Callable[..., Tensor]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what copies and prints look for
            raise AttributeError(name)
        raise ModelError(_computed(f"reads its .{name}"))

    def _refuse(self, *args: Any) -> Any:
        raise ModelError(_computed("computes with it"))

    __getitem__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __and__ = __rand__ = __or__ = __ror__ = __invert__ = __neg__ = _refuse


def _computed(how: str) -> str:
    return (
        f"the model makes something of its own of the attention mask: it {how}. A paged "
        "cache follows masks that transformers makes alone, causal ones with or without a window; "
        "not learned ones (Doge), nor pictures that are seen in both directions (PaliGemma). "
        "fg.from_module(model) runs whole inputs: see docs/transformers.md"
    )


@dataclasses.dataclass
class Attending:
    """What attention needs in one call of the model.

    Attributes:
        batch: the step's batch, with the fields of `fg.ops.AttentionMeta`.
        cache: a (k, v) pair for each attention call, in order; None: only note the layers.
        longest: tokens that the longest request may have.
        layers: the calls so far.
        windows: of the masks so far.
    """

    batch: Any
    cache: Sequence[tuple[Tensor, Tensor]] | None
    longest: int
    layers: list[Layer] = dataclasses.field(default_factory=list)
    windows: dict[Any, int | None] = dataclasses.field(default_factory=dict)

    @property
    def modules(self) -> set[int]:
        """The ids of the modules that have attended; one may do so more than once."""
        return {id(layer.module) for layer in self.layers}


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    is_causal: bool | None = None,
    fngraph: Attending | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The attention function: (1, H, T, D) in, (1, T, H, D) out.

    Raises:
        ModelError: something that `fg.ops.attention` cannot do, or that never reached it.
    """
    where = type(module).__name__
    if fngraph is None:
        raise ModelError(
            f"{where} is not given the keyword arguments of model(...), so it cannot find its "
            "cache. The model has to hand **kwargs down to its attention, as Llama does"
        )
    if is_causal is False or not getattr(module, "is_causal", True):
        raise ModelError(f"{where} attends in both directions; a paged cache holds the past only")
    unknown = {n for n, x in options.items() if x is not None and n not in _HARMLESS}
    if dropout:
        unknown.add("dropout")
    if unknown:
        raise ModelError(
            f"{where} asks for attention with {', '.join(sorted(unknown))}, which "
            "fg.ops.attention does not have"
        )
    q_THD, k_TKD, v_TKD = (x[0].transpose(0, 1) for x in (query, key, value))
    wider = q_THD.shape[-1] - v_TKD.shape[-1]
    if wider < 0:
        raise ModelError(
            f"the values of {where} have {v_TKD.shape[-1]} columns a head, its queries and keys "
            f"{q_THD.shape[-1]}. A paged cache has one head dim, in which narrower values are "
            "padded, and wider ones have no place. fg.from_module(model) runs whole inputs: see "
            "docs/transformers.md"
        )
    if wider:  # one head dim for the whole cache: zeros there come out as zeros
        v_TKD = pad(v_TKD, (0, wider))
    layer = len(fngraph.layers)
    fngraph.layers.append(Layer(module, k_TKD.shape[1], k_TKD.shape[2], k_TKD.dtype))
    if not isinstance(attention_mask, Mask):
        raise ModelError(
            f"{where} makes its own attention mask ({type(attention_mask).__name__}), which a "
            "paged cache cannot follow. Models that use transformers' create_causal_mask can run"
        )
    if attention_mask not in fngraph.windows:  # layers share one
        fngraph.windows[attention_mask] = window_of(attention_mask, fngraph.longest, where)
    window = fngraph.windows[attention_mask]
    if fngraph.cache is None:
        out_THD = torch.zeros_like(q_THD)
    else:
        kv = fngraph.cache[layer]
        options = {"scale": scaling, "window": window, "softcap": softcap}
        out_THD, _ = attention(q_THD, k_TKD, v_TKD, kv, fngraph.batch, **options)
    return out_THD[None, ..., : value.shape[-1]], None


def mask_rule(*, mask_function: Callable[..., Tensor], **options: Any) -> Mask:
    """The mask function: a rule in place of a mask."""
    return Mask(mask_function)


def window_of(mask: Mask, longest: int, where: str) -> int | None:
    """How many tokens a mask lets a token see, itself included; None: all before it.

    Raises:
        ModelError: a mask that is not a causal one with or without a window.
    """
    try:
        with without_modes():  # a rule is Python over indices, and has nothing to trace
            # neighbors too: the ends of chunks alone would look like a window
            near = [(longest - 1 >> i) - j for i in range(longest.bit_length()) for j in range(3)]
            q_QS = torch.tensor(sorted({q for q in near if q >= 0}))[:, None]
            k_QS = torch.arange(longest)[None]
            zero = torch.zeros((), dtype=torch.int64)
            sees_QS = mask.sees(zero, zero, q_QS, k_QS).expand(len(q_QS), longest)
            window = int(sees_QS[-1].sum())
            windowed_QS = (k_QS <= q_QS) & (k_QS > q_QS - window)
            regular = torch.equal(sees_QS, windowed_QS)
    except Exception as error:  # a rule that reads tensors of the trace, for one
        raise ModelError(f"the attention mask of {where} depends on the batch: {error}") from error
    if not regular:
        raise ModelError(
            f"the attention mask of {where} is not causal with an optional sliding window (chunked "
            "or bidirectional attention?), and fg.ops.attention has no other"
        )
    return None if window == longest else window


@contextlib.contextmanager
def routed(model: Any) -> Iterator[None]:
    """For the duration, `model` attends with `attend`; its config is as it was after that."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask_rule)
    with attending_with(model, NAME):
        yield


@contextlib.contextmanager
def attending_with(model: Any, name: str) -> Iterator[None]:
    """For the duration, `model` and all parts of it attend with the implementation `name`."""
    config = model.config
    before = {"": config._attn_implementation} | {
        part: getattr(config, part)._attn_implementation
        for part in config.sub_configs
        if getattr(config, part, None) is not None
    }
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        model.set_attn_implementation(before)
