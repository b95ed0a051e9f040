"""Mamba-2 as pure functions: a state a request in place of a paged cache, and no positions.

Shape letters: T query tokens, R requests, E model dim, H heads, P head dim, I = H*P, G groups,
N state dim, C = I + 2*G*N channels of the convolution, W its taps, V vocab.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import linear, silu, softplus

import fngraph as fg
from fngraph.models.families import layers
from fngraph.models.families.decoder import (
    Params as Params,
    entered,
    head_of,
    logits,
    params_of,
    vocabulary_splits,
)
from fngraph.models.families.layers import Room, paired, rms_norm
from fngraph.models.weights import loading, naming
from fngraph.models.weights.naming import shape
from fngraph.models.weights.splits import Each, Size, Specs, Split, rows, summed

State = tuple[
    Tensor, Tensor
]  # one layer's (last inputs, state): (slots, C, W - 1), (slots, H, P, N)


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """Sizes of a model. Hashable, and part of the structure of its `Params`."""

    vocab_size: int  # V
    num_layers: int
    dim: int  # E
    num_heads: int  # H
    head_dim: int  # P
    num_groups: int  # G
    state_dim: int  # N
    taps: int  # W
    norm_eps: float = 1e-5
    dt_limit: tuple[float, float] = (0.0, float("inf"))
    wide_residual: bool = True  # what layers add up is float32
    tied: bool = False  # the head is the embedding

    @property
    def inner(self) -> int:
        """I."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """C."""
        return self.inner + 2 * self.num_groups * self.state_dim


@fg.struct
class Layer:
    """Weights of one layer, matrices as (out, in)."""

    norm: Tensor  # (E,)
    w_in: Tensor  # (I + C + H, E): the gate, what is convolved, the time step
    conv: Tensor  # (C, 1, W)
    conv_bias: Tensor  # (C,)
    dt_bias: Tensor  # (H,)
    a_log: Tensor  # (H,)
    skip: Tensor  # (H,): how much of the input passes the state by
    gate_norm: Tensor  # (I,)
    w_out: Tensor  # (E, I)


@fg.struct
class Batch:
    """One step's tokens, R requests of one or more tokens each, laid end to end."""

    token_ids: Tensor = fg.buffer("T", "int64")
    seq_lens: Tensor = fg.buffer("R", "int32", pad=0)  # this step's tokens included
    query_start_loc: Tensor = fg.buffer("R + 1", "int32", pad="stride")
    state_slots: Tensor = fg.buffer("R", "int64", pad=-1)  # -1: keep nothing
    logits_indices: Tensor = fg.buffer(
        "R", "int64", pad=0, min=0
    )  # the head runs on R rows, not on T
    spec: fg.BatchSpec = fg.host()


def forward(
    params: Params, cache: tuple[State, ...], batch: Batch
) -> tuple[Tensor, tuple[State, ...]]:
    """The logits of each request's rows `logits_indices`, (R, V), and the updated states."""
    config, kept = params.config, []
    x_TE = entered(params, batch)
    for layer, state in paired(params.layers, cache):
        x_TE, state = residual_layer(config, layer, x_TE, state, batch)
        kept.append(state)
    if params.norm is None:
        return x_TE, tuple(kept)
    x_RE = x_TE[batch.logits_indices].to(head_of(params).dtype)
    return logits(params, x_RE), tuple(kept)


@fg.block
def residual_layer(
    config: Config, layer: Layer, x_TE: Tensor, state: State, batch: Batch
) -> tuple[Tensor, State]:
    """x + mixer(norm(x)), and the layer's state."""
    normed_TE = rms_norm(x_TE.to(layer.norm.dtype), layer.norm, config.norm_eps)
    out_TE, state = mixer(config, layer, normed_TE, state, batch)
    return (x_TE.float() if config.wide_residual else x_TE) + out_TE, state


def mixer(
    config: Config, layer: Layer, x_TE: Tensor, state: State, batch: Any
) -> tuple[Tensor, State]:
    """Convolution, state space, gate; and the layer's state."""
    conv_state, ssm_state = state
    H, G, I, GN = (
        config.num_heads, config.num_groups, config.inner, config.num_groups * config.state_dim,
    )  # fmt: skip
    gate_TI, in_TC, dt_TH = linear(x_TE, layer.w_in).split([I, config.channels, H], dim=-1)
    mixed_TC, conv_state = fg.ops.causal_conv(in_TC, layer.conv[:, 0], conv_state, batch)
    x_TI, b_TGN, c_TGN = silu(mixed_TC + layer.conv_bias).split([I, GN, GN], dim=-1)
    x_THP = rearrange(x_TI, "t (h p) -> t h p", h=H)
    b_TGN, c_TGN = (rearrange(x, "t (g n) -> t g n", g=G) for x in (b_TGN, c_TGN))
    dt_TH = softplus(dt_TH.float() + layer.dt_bias.float()).clamp(*config.dt_limit)
    a_H = -layer.a_log.float().exp()
    y_THP, ssm_state = fg.ops.ssd(x_THP, dt_TH, a_H, b_TGN, c_TGN, ssm_state, batch)
    y_THP = y_THP.float() + x_THP.float() * layer.skip.float()[:, None]
    gated_TI = rearrange(y_THP, "t h p -> t (h p)") * silu(gate_TI.float())
    normed_TI = rms_norm(gated_TI, layer.gate_norm.float(), config.norm_eps)
    return linear(normed_TI.to(x_TE.dtype), layer.w_out), (conv_state, ssm_state)


def blank(config: Config) -> Params:
    """`Params` of meta tensors: the one list of weights that init and files go by."""
    E, H, I, C = config.dim, config.num_heads, config.inner, config.channels
    layer = Layer(
        norm=shape(E), w_in=shape(I + C + H, E), conv=shape(C, 1, config.taps), conv_bias=shape(C),
        dt_bias=shape(H), a_log=shape(H), skip=shape(H), gate_norm=shape(I), w_out=shape(E, I),
    )  # fmt: skip
    return params_of(config, [layer] * config.num_layers)


def specs(config: Config) -> Specs:
    """How a model of this config is split over an axis "tp": heads, their groups, vocabulary. The
    norm behind the gate is over all heads."""
    head, one = Each(config.num_heads, config.head_dim), rows(Each(config.num_heads))
    group = Each(config.num_groups, config.state_dim, repeated=True)
    convolved = (head, group, group)
    parts = {
        "w_in": rows((head, *convolved, Each(config.num_heads))), "conv": rows(convolved),
        "conv_bias": rows(convolved), "dt_bias": one, "a_log": one, "skip": one,
        "gate_norm": Split({0: ("tp", head)}, "gain"), "w_out": summed(head),
    }  # fmt: skip
    weights = {f"layers.*.{name}": part for name, part in parts.items()}
    sizes = {"num_heads": Size(), "num_groups": Size(repeated=True)}
    return Specs({**vocabulary_splits(config), **weights}, sizes)


def empty(config: Config, room: Room) -> tuple[State, ...]:
    """A slot for each request in each layer, without pages; states are float32."""
    H, P, N = config.num_heads, config.head_dim, config.state_dim
    return tuple(
        (room.slots(config.channels, config.taps - 1), room.slots(H, P, N, dtype=torch.float32))
        for _ in range(config.num_layers)
    )


init_params = functools.partial(
    naming.init_params, blank, vectors={"conv_bias": 0.0, "dt_bias": -2.0}
)  # config, *, seed, device, dtype
init_cache = functools.partial(layers.init_cache, empty)  # config, num_blocks, *, block_size, ...


def read_config(raw: loading.Raw) -> Config:
    """The config of a config.json.

    Raises:
        ValueError: heads that do not fill what the layer is widened to.
    """
    inner = raw["num_heads"] * raw["head_dim"]
    if inner != raw["hidden_size"] * raw.get("expand", 2):
        raise ValueError(
            f"num_heads * head_dim is {inner}, but hidden_size * expand "
            f"{raw['hidden_size'] * raw.get('expand', 2)}"
        )
    least, most = raw["time_step_limit"]  # transformers 5 writes {"__float__": "Infinity"}
    most = float(most["__float__"] if isinstance(most, dict) else most)
    return Config(
        vocab_size=raw["vocab_size"], num_layers=raw["num_hidden_layers"], dim=raw["hidden_size"],
        num_heads=raw["num_heads"], head_dim=raw["head_dim"], num_groups=raw["n_groups"],
        state_dim=raw["state_size"], taps=raw["conv_kernel"], norm_eps=raw["layer_norm_epsilon"],
        dt_limit=(float(least), most), wide_residual=raw["residual_in_fp32"],
        tied=raw.get("tie_word_embeddings", False),
    )  # fmt: skip


FORMAT = loading.Format(
    read_config,
    blank,
    names={
        "embed": "backbone.embeddings.weight",
        "norm": "backbone.norm_f.weight",
        "head": "lm_head.weight",
        "layers.*.norm": "backbone.layers.*.norm.weight",
        "layers.*.w_in": "backbone.layers.*.mixer.in_proj.weight",
        "layers.*.conv": "backbone.layers.*.mixer.conv1d.weight",
        "layers.*.conv_bias": "backbone.layers.*.mixer.conv1d.bias",
        "layers.*.dt_bias": "backbone.layers.*.mixer.dt_bias",
        "layers.*.a_log": "backbone.layers.*.mixer.A_log",
        "layers.*.skip": "backbone.layers.*.mixer.D",
        "layers.*.gate_norm": "backbone.layers.*.mixer.norm.weight",
        "layers.*.w_out": "backbone.layers.*.mixer.out_proj.weight",
    },
    only={"hidden_act": "silu", "use_bias": False, "use_conv_bias": True, "rms_norm": True},
    harmless=(
        "chunk_size", "intermediate_size", "norm_before_gate", "rescale_prenorm_residual",
        "time_step_*",
    ),
    copies={"lm_head.weight": "backbone.embeddings.weight"},
    wide=("dt_bias", "a_log", "skip", "gate_norm"),
    specs=specs,
)  # fmt: skip
load = functools.partial(loading.load, FORMAT)  # folder, *, device, dtype, mesh -> config, params
