"""Training for decoders of a few million weights: one step, one look, and the loop over both.

Plain torch: AdamW, a cosine schedule, and a running average of the weights, which is what comes
out. Two guards against learning a small text by heart: dropout on the weight matrices, and
keeping the average that did best on the held-out text.

Shape letters: N sequences of S bytes; T = N * S, the others as in `fngraph.models.families.llama`.
"""

from __future__ import annotations

import argparse
import functools
import math
import time
from collections.abc import Mapping
from typing import NamedTuple

import torch
from einops import rearrange, repeat
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.nn.functional import cross_entropy, dropout, scaled_dot_product_attention

from fngraph.models.families import llama
from fngraph.models.families.decoder import logits, transformer
from fngraph.models.weights import naming

Named = dict[str, Tensor]  # weights by name
COLUMNS = (
    TextColumn("step {task.fields[step]}"),
    BarColumn(),
    TextColumn("loss {task.fields[loss]:.3f}, held out {task.fields[held_out]:.3f}"),
    TimeRemainingColumn(),
)


def fit(
    config: llama.Config, train: Tensor, held_NS: Tensor, flags: argparse.Namespace
) -> tuple[Named, int, float]:
    """The averaged weights that did best on the held-out text, the steps taken and the minutes."""
    named = naming.named(llama.init_params(config, seed=flags.seed, device=flags.device))
    optimizer = adamw(named, flags)
    average = {n: w.detach().clone() for n, w in named.items()}
    best, best_loss, loss = average, math.inf, torch.tensor(math.inf)
    started, step, done, looks = time.monotonic(), 0, 0.0, 0
    with Progress(*COLUMNS) as progress:
        bar = progress.add_task("training", total=1.0, step=0, loss=math.inf, held_out=math.inf)
        while done < 1:
            loss = update(config, named, optimizer, draw(train, flags), done, flags)
            step += 1
            blend(average, named, 1 - min(0.999, step / (step + 9)))
            minutes = (time.monotonic() - started) / 60
            done = max(step / flags.steps, minutes / flags.minutes)
            if done * flags.looks < looks + 1:  # nothing here may wait for the device
                continue
            looks = int(done * flags.looks)
            held_loss = evaluate(config, average, held_NS, flags)
            if held_loss < best_loss:
                best, best_loss = {n: w.clone() for n, w in average.items()}, held_loss
            progress.update(bar, completed=done, step=step, loss=loss.item(), held_out=held_loss)
    return best, step, minutes


def adamw(named: Named, flags: argparse.Namespace) -> torch.optim.Optimizer:
    """AdamW over leaves that now ask for gradients; norms are not decayed."""
    for weight in named.values():
        weight.requires_grad_()
    matrices = [w for w in named.values() if w.ndim == 2]
    vectors = [w for w in named.values() if w.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": flags.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=flags.lr, betas=(0.9, 0.99), fused=True)


def update(
    config: llama.Config, named: Named, optimizer: torch.optim.Optimizer, text_NS: Tensor,
    done: float, flags: argparse.Namespace,
) -> Tensor:  # fmt: skip
    """One step at `done` (0 to 1) of the schedule, in place; the loss, still on the device."""
    for group in optimizer.param_groups:
        group["lr"] = (
            flags.lr * min(1.0, (done + 1e-3) / 0.03) * (0.51 + 0.49 * math.cos(math.pi * done))
        )
    with torch.autocast("cuda", torch.bfloat16, enabled=named["embed"].is_cuda):
        dropped = {n: dropout(w, flags.drop) if w.ndim == 2 else w for n, w in named.items()}
        loss = nats_a_byte(config, dropped, text_NS)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(named.values(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def draw(data: Tensor, flags: argparse.Namespace) -> Tensor:
    """(N, S + 1) bytes from random places; the data stays on the device."""
    start_N = torch.randint(len(data) - flags.context, (flags.batch,), device=data.device)
    offset_S = torch.arange(flags.context + 1, device=data.device)
    return data[rearrange(start_N, "n -> n 1") + offset_S].long()


@torch.no_grad()
def blend(average: Named, named: Mapping[str, Tensor], weight: float) -> None:
    """average += weight * (named - average), in place."""
    for name, value in named.items():
        average[name].lerp_(value, weight)


def cut(data: Tensor, context: int) -> Tensor:
    """All of `data` as (N, S + 1) sequences, each begun by the last byte of the one before."""
    return data.unfold(0, context + 1, context).long()


@torch.no_grad()
def evaluate(
    config: llama.Config, named: Named, text_NS: Tensor, flags: argparse.Namespace
) -> float:
    """Mean nats a byte, without dropout."""
    parts = text_NS.split(flags.batch)
    losses = [nats_a_byte(config, named, part) * len(part) for part in parts]
    return (torch.stack(losses).sum() / len(text_NS)).item()


def nats_a_byte(config: llama.Config, named: Named, text_NS: Tensor) -> Tensor:
    """Mean loss of predicting each byte of (N, S + 1) from those before it in its sequence."""
    params = naming.filled(llama.blank(config), named)
    input_NS, target_NS = text_NS[:, :-1], text_NS[:, 1:]
    position_S = torch.arange(input_NS.shape[1], device=text_NS.device)
    texts = Texts(
        rearrange(input_NS, "n s -> (n s)"),
        repeat(position_S, "s -> (n s)", n=len(text_NS)),
        len(text_NS),
    )
    attention = functools.partial(llama.attention, attend=attend_within)
    hidden_TE, _ = transformer(
        params, (None,) * config.num_layers, texts, attention, rope_dim=config.head_dim
    )
    return cross_entropy(logits(params, hidden_TE), rearrange(target_NS, "n s -> (n s)"))


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
