"""What a decoder is trained for: each token of a sequence from those before it.

Shape letters: N sequences of S tokens, and the one behind them; T = N * S, P weights, the others as
in `fngraph.models.families.llama`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from einops import rearrange, repeat
from torch import Tensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import fngraph as fg
from fngraph.models.families import llama
from fngraph.models.families.decoder import decoder_layer, logits, transformer
from fngraph.models.training.flat import Flat, unpacked


def make_loss(
    config: llama.Config, *, dtype: torch.dtype = torch.float32, checkpoint: bool = False
) -> Callable[..., Tensor]:
    """loss(flat, tokens_NS, mask=None) -> (): mean nats a token of weights that are one vector.

    Args:
        dtype: what layers compute in; weights, their gradients and the loss are float32.
        checkpoint: whether a layer's activations are made again for its backward.
    """
    blank = llama.blank(config)

    def loss(flat: Flat, tokens_NS: Tensor, mask_P: Tensor | None = None) -> Tensor:
        if mask_P is not None:
            flat = Flat(flat.matrices * mask_P, flat.vectors)
        narrow = None if dtype is torch.float32 else dtype
        return nats_a_token(unpacked(blank, flat, narrow), tokens_NS, checkpoint=checkpoint)

    return loss


def dropped(flat: Flat, step: Tensor, *, share: float, seed: int) -> Tensor:
    """(P,): 0 for a share of the matrices' elements, and as much more for the others.

    A pure function of the step and the seed: there is no generator whose state a run would have to
    keep, and a GPU's masks are a CPU's.
    """
    element_P = torch.arange(len(flat.matrices), device=flat.matrices.device)
    uniform_P = hashed(hashed(element_P + hashed(step + seed * 7919)) + step) / 2**32
    return (uniform_P >= share) / (1 - share)


def hashed(x: Tensor) -> Tensor:
    """Whole numbers of 32 bits, in int64, that look random; x >= 0 is taken by its low 32 bits.

    Source: one of two rounds from the list of C. Wellons' hash-prospector; of its constants no
    product overflows.
    """
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return x ^ (x >> 15)


def nats_a_token(params: llama.Params, tokens_NS: Tensor, *, checkpoint: bool = False) -> Tensor:
    """Mean loss of predicting each token of (N, S + 1) from those before it in its sequence, ().

    Args:
        tokens_NS: of any dtype of integers.
        checkpoint: see `make_loss`.
    """
    config = params.config
    input_NS, target_NS = tokens_NS[:, :-1].long(), tokens_NS[:, 1:].long()
    position_S = torch.arange(input_NS.shape[1], device=tokens_NS.device)
    texts = Texts(
        rearrange(input_NS, "n s -> (n s)"),
        repeat(position_S, "s -> (n s)", n=len(tokens_NS)),
        len(tokens_NS),
    )
    hidden_TE, _ = transformer(
        params, (None,) * config.num_layers, texts,
        functools.partial(llama.attention, attend=attend_within), rope_dim=config.head_dim,
        layer=fg.checkpoint(decoder_layer) if checkpoint else decoder_layer,
    )  # fmt: skip
    logits_TV = logits(params, hidden_TE).float()
    return cross_entropy(logits_TV, rearrange(target_NS, "n s -> (n s)"))


class Texts(NamedTuple):
    """A batch for the layers: sequences of equal length, end to end."""

    token_ids: Tensor  # (T,)
    positions: Tensor  # (T,)
    num_seqs: int  # N


def attend_within(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, kept: None, texts: Texts
) -> tuple[Tensor, None]:
    """Dense causal attention of each sequence by itself; nothing is cached."""
    groups, N = q_THD.shape[1] // k_TKD.shape[1], texts.num_seqs
    q_NHSD = rearrange(q_THD, "(n s) h d -> n h s d", n=N)
    k_NHSD = repeat(k_TKD, "(n s) k d -> n (k g) s d", n=N, g=groups)
    v_NHSD = repeat(v_TKD, "(n s) k d -> n (k g) s d", n=N, g=groups)
    out_NHSD = scaled_dot_product_attention(q_NHSD, k_NHSD, v_NHSD, is_causal=True)
    return rearrange(out_NHSD, "n h s d -> (n s) h d"), None


@torch.no_grad()
def evaluate(params: llama.Params, tokens_NS: Tensor, batch: int) -> float:
    """Mean nats a token over all sequences, so many at a time."""
    losses = [nats_a_token(params, part) * len(part) for part in tokens_NS.split(batch)]
    return (torch.stack(losses).sum() / len(tokens_NS)).item()
