"""What decoders have in common: `Params`, the last norm and head, and for most of them the layers.

A family whose layers are those of `decode` says what differs:

    attention(config, weights, x_TE, rope, kept, batch) -> (T, E), and what its layer keeps
    mixture(config, weights, x_TE, real_T) -> (T, E), where a layer has no plain mlp

Training and other caches run the same layers, through `transformer`, with an `attend` of their own.
Shape letters as in `fngraph.models.families.llama`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.nn.functional import linear

import fngraph as fg
from fngraph.models.families.layers import Mlp, mlp, paired, rms_norm
from fngraph.models.families.rope import rotation
from fngraph.models.weights.naming import shape
from fngraph.models.weights.splits import Each, Split

NormFn = Callable[[Tensor, Tensor, float], Tensor]
AttentionFn = Callable[..., tuple[Tensor, Any]]
AttendFn = Callable[..., tuple[Tensor, Any]]  # q_THD, k_TKD, v_TKD, kept, batch -> out_THD, kept
LayerFn = Callable[..., tuple[Tensor, Any]]  # as `decoder_layer`
MixtureFn = Callable[[Any, Any, Tensor, Tensor], Tensor]


@fg.struct
class Params:
    """Weights of a decoder, or of one stage of it: see `stages_of`."""

    embed: Tensor  # (V, E); None where an earlier stage has it
    layers: tuple[Any, ...]  # the family's Layer
    norm: Tensor  # (E,); None where a later stage has it
    head: Tensor | None  # (V, E); None where it is tied to embed, or a later stage has it
    config: Any = fg.static()  # the family's Config


@fg.struct
class Layer:
    """Weights of one layer."""

    attn_norm: Tensor  # (E,)
    attn: Any  # the family's Attention
    mlp_norm: Tensor  # (E,)
    mlp: Any  # Mlp, or the family's Mixture


def decode(
    params: Params, cache: tuple[Any, ...], batch: Any, attention: AttentionFn,
    mixture: MixtureFn | None = None, *, rope_dim: int, norm: NormFn = rms_norm,
) -> tuple[Tensor, tuple[Any, ...]]:  # fmt: skip
    """The logits of each request's rows `logits_indices`, (R, V), and the updated cache.

    Of a stage that is not the last, hidden states (T, E) in place of logits.
    """
    x_TE, cache = transformer(
        params, cache, batch, attention, mixture, rope_dim=rope_dim, norm=norm
    )
    return left(params, x_TE, batch, norm), cache


def entered(params: Params, batch: Any) -> Tensor:
    """What the layers begin with, (T, E): embeddings, or of a later stage than the first `hidden`,
    which is what the one before has left."""
    found: Tensor = batch.hidden if params.embed is None else params.embed[batch.token_ids]
    return found


def left(params: Params, x_TE: Tensor, batch: Any, norm: NormFn = rms_norm) -> Tensor:
    """The logits of rows `logits_indices`, (R, V); of a stage that is not the last, x itself."""
    return x_TE if params.norm is None else logits(params, x_TE[batch.logits_indices], norm)


def transformer(
    params: Params, cache: tuple[Any, ...], batch: Any, attention: AttentionFn,
    mixture: MixtureFn | None = None, *, rope_dim: int, norm: NormFn = rms_norm,
    layer: LayerFn | None = None,
) -> tuple[Tensor, tuple[Any, ...]]:  # fmt: skip
    """Hidden states (T, E) before the last norm, and the updated cache.

    `attention` says which tokens see which: serving looks over a paged cache, training over the
    other tokens of its T. Of `batch` the layers read `token_ids` and `positions`, and mixtures
    `slot_mapping`; the rest is for `attention`. Later stages than the first read `hidden`, (T, E).
    """
    config = params.config
    x_TE = entered(params, batch)
    rope = rotation(batch.positions, rope_dim, config.rope_theta, x_TE.dtype, config.rope_scaling)
    return all_layers(params, x_TE, rope, cache, batch, attention, mixture, norm=norm, layer=layer)


def all_layers(
    params: Params, x_TE: Tensor, rope: Any, cache: tuple[Any, ...], batch: Any,
    attention: AttentionFn, mixture: MixtureFn | None = None, *, norm: NormFn = rms_norm,
    added: Sequence[Tensor] = (), layer: LayerFn | None = None,
) -> tuple[Tensor, tuple[Any, ...]]:  # fmt: skip
    """As `transformer`, of embeddings and angles that are there already.

    Args:
        layer: in place of `decoder_layer`, which training may mark.
        rope: what `attention` takes it for, a `Turn` or one for each kind of layer.
        added: (T, E) each, to what comes out of the first layers, one a layer.
    """
    kept, body = [], layer or decoder_layer
    for i, (weights, own) in enumerate(paired(params.layers, cache)):
        x_TE, own = body(params.config, weights, x_TE, rope, own, batch, attention, mixture, norm)
        x_TE = x_TE + added[i] if i < len(added) else x_TE
        kept.append(own)
    return x_TE, tuple(kept)


@fg.block
def decoder_layer(
    config: Any, layer: Layer, x_TE: Tensor, rope: Any, kept: Any, batch: Any,
    attention: AttentionFn, mixture: MixtureFn | None, norm: NormFn,
) -> tuple[Tensor, Any]:  # fmt: skip
    """x + attention(norm(x)), plus the mlp or the experts of its norm; and what is kept."""
    normed_TE = norm(x_TE, layer.attn_norm, config.norm_eps)
    out_TE, kept = attention(config, layer.attn, normed_TE, rope, kept, batch)
    x_TE = x_TE + out_TE
    normed_TE = norm(x_TE, layer.mlp_norm, config.norm_eps)
    if mixture is None or isinstance(layer.mlp, Mlp):
        return x_TE + mlp(layer.mlp, normed_TE), kept
    return x_TE + mixture(config, layer.mlp, normed_TE, batch.slot_mapping >= 0), kept


def logits(params: Params, x_RE: Tensor, norm: NormFn = rms_norm) -> Tensor:
    """(R, V): the last norm and the head."""
    return linear(norm(x_RE, params.norm, params.config.norm_eps), head_of(params))


def head_of(params: Params) -> Any:
    """(V, E), of a model that is whole, or of its last stage."""
    return params.embed if params.head is None else params.head


def stages_of(params: Params, count: int) -> tuple[Params, ...]:
    """A decoder in so many stages, each with its own layers and as many of them, give or take one;
    the first has the embedding, the last the norm and the head. Weights are shared, not copied.

    `init_cache(stage.config, ...)` is the cache of a stage.

    Raises:
        ValueError: fewer layers than stages, or fewer than one.
    """
    total = len(params.layers)
    if not 1 <= count <= total:
        raise ValueError(f"{count} stages of {total} layers: pass 1 to {total}")
    ends = [total * i // count for i in range(count + 1)]
    head, made = head_of(params), []
    for i, (begin, end) in enumerate(itertools.pairwise(ends)):
        first, last = i == 0, i == count - 1
        own: dict[str, Any] = {
            "embed": params.embed if first else None,
            "norm": params.norm if last else None,
            "head": (params.head if first else head) if last else None,
        }
        config = of_layers(params.config, begin, end)
        layers = params.layers[begin:end]
        made.append(dataclasses.replace(params, layers=layers, config=config, **own))
    return tuple(made)


def of_layers(config: Any, begin: int, end: int) -> Any:
    """The config of these layers of a model, in which they are counted from 0."""
    own: dict[str, Any] = {"num_layers": end - begin}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name.endswith("_layers") and isinstance(value, tuple):  # which ones are of a kind
            own[field.name] = tuple(i - begin for i in value if begin <= i < end)
        elif field.name == "num_dense":  # the first ones
            own[field.name] = max(0, min(value, end) - begin)
    return dataclasses.replace(config, **own)


def params_of(config: Any, layers: Iterable[Any]) -> Params:
    """Shapes of a decoder with these layers."""
    embed = shape(config.vocab_size, config.dim)
    return Params(embed, tuple(layers), shape(config.dim), None if config.tied else embed, config)


def layer_of(config: Any, attn: Any, mlp: Any) -> Layer:
    """Shapes of one layer around those of its parts."""
    return Layer(shape(config.dim), attn, shape(config.dim), mlp)


DECODER_NAMES = {
    "embed": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
    "layers.*.attn_norm": "model.layers.*.input_layernorm.weight",
    "layers.*.mlp_norm": "model.layers.*.post_attention_layernorm.weight",
}
"""What Hugging Face calls these weights, for `loading.Format.names`."""


def vocabulary_splits(config: Any) -> dict[str, Split]:
    """How embedding and head are split, for `splits.Specs`."""
    part = Split({0: ("tp", Each(config.vocab_size, padded=True))}, "vocabulary")
    return {"embed": part, "head": part}


WITHOUT_HEAD = ((r"^(?=(embed_tokens|layers|norm)\.)", "model."),)
"""What a model saved without its head leaves out of these, for `loading.Format.renamed`."""
