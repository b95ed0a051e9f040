"""What a decode step is measured on: weights, memory of a cache, and what is right.

The ways share one memory for k and v, each with its own view of it: in pages, or contiguous. What
one leaves there are finite numbers to the next, so clocks are not changed by it; `fill` puts the
same tokens there for each before its results are judged.

Shape letters: L layers, R requests, S tokens of each, K kv heads, D head dim, V vocab, X experts,
C chosen ones of a token.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import fngraph as fg
from benchmarks.decode import plain
from benchmarks.decode.models import MODELS, Model
from benchmarks.workload import BF16, BLOCK_SIZE, random_params

Views = list[tuple[Tensor, Tensor]]  # each layer's k and v, each (R, S, K, D), wherever they lie
PEAKED = 3.0  # of keys: so that attention picks some tokens, not the mean of all
MARGIN, TRIES = 0.05, 128  # of logits between an expert that is chosen and one that is not


@dataclasses.dataclass(frozen=True)
class Right:
    """What a step over `fill`'s tokens should give.

    Attributes:
        ids: (R,) int64, the tokens of the step; of several a request, (R * T,).
        logits: (R, V), of each request's last token, in float64 or float32.
        new: each layer's k and v of that token, (R, K, D), likewise.
        away: what each layer's other keys have less, (R, K, D); see `Hiding`.
    """

    ids: Tensor
    logits: Tensor
    new: list[tuple[Tensor, Tensor]]
    away: Sequence[Tensor] = ()


@dataclasses.dataclass(frozen=True)
class Made:
    """A way, ready for a number of requests.

    Attributes:
        step: tokens, (R,), to the next ones, without a wait; what it returns it takes again.
        logits: of the last step, (R, V).
        views: where it keeps k and v now.
        wait: till the device has done all.
        on_stream: whether its work is on torch's current stream, where events can be put.
        more: of the row.
    """

    step: Callable[[Any], Any]
    logits: Callable[[], Tensor]
    views: Callable[[], Views]
    wait: Callable[[], None]
    on_stream: bool = True
    more: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Bench:
    """One model at one context.

    Attributes:
        batches: numbers of requests, of the largest of which `memory` has room.
        new: tokens of each request that a step computes, the last of its context.
        params: of the family, projections side by side.
        memory: flat k and v of each layer.
    """

    model: Model
    context: int
    batches: tuple[int, ...]
    device: str
    backend: str | None
    params: Any
    memory: list[tuple[Tensor, Tensor]]
    new: int = 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of each step."""
        return tuple(num_reqs * self.new for num_reqs in self.batches)

    @property
    def config(self) -> Any:
        """The model's."""
        return self.model.config

    def pages(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """All of the memory as a paged cache."""
        shape = (-1, BLOCK_SIZE, self.config.num_kv_heads, self.config.head_dim)
        return tuple((k.view(shape), v.view(shape)) for k, v in self.memory)

    def in_pages(self, num_reqs: int) -> Views:
        """The same, of requests whose blocks follow one another."""
        return self._views((num_reqs, self.context, self.config.num_kv_heads))

    def contiguous(self, num_reqs: int) -> tuple[plain.KV, ...]:
        """The memory as caches of (R, K, S, D)."""
        return tuple(self._views((num_reqs, self.config.num_kv_heads, self.context)))

    def _views(self, dims: tuple[int, ...]) -> Views:
        shape = (*dims, self.config.head_dim)
        size = torch.Size(shape).numel()
        return [(k[:size].view(shape), v[:size].view(shape)) for k, v in self.memory]

    def wait(self) -> None:
        """Till the device has done all."""
        if self.device.startswith("cuda"):
            torch.cuda.synchronize()

    def positions(self, num_reqs: int) -> Tensor:
        """(R,) int64: of this step's token, the last."""
        return torch.full((num_reqs,), self.context - 1, device=self.device)

    @torch.no_grad()
    def right(self, num_reqs: int, seed: int = 0) -> Right:
        """What float64 gives, a layer's weights at a time.

        Of experts that are nearly as likely, rounding may choose another: tokens for which there
        are such are drawn again.
        """
        generator = torch.Generator().manual_seed(seed)
        ids = self.ids(num_reqs, generator)
        for _ in range(TRIES):
            hiding = Hiding()
            right, margin = self.reference(ids, torch.float64, hiding)
            right = dataclasses.replace(right, away=hiding.away)
            near = margin < MARGIN
            if not near.any():
                break
            ids = torch.where(near, self.ids(num_reqs, generator), ids)
        return right

    def reference(
        self, ids: Tensor, dtype: torch.dtype, attend: plain.Attend
    ) -> tuple[Right, Tensor]:
        """What a wider dtype gives, a layer's weights at a time; and how near a choice of experts
        was, (R,), in logits."""
        config, weights, R = self.config, plain.weights_of(self.params), len(ids) // self.new
        mix = Looped(torch.full((R,), float("inf"), device=self.device))
        first = self.context - self.new
        positions = torch.arange(first, self.context, device=self.device).expand(R, -1)
        seen = torch.arange(self.context, device=self.device) <= positions[..., None]
        x = F.embedding(ids.view(R, self.new), weights.embed).to(dtype)
        turn, new = plain.turn_of(config, positions, dtype), []
        for layer, pair in zip(weights.layers, self.drawn(R)):
            k, v = (x.to(dtype).transpose(1, 2).contiguous() for x in pair)
            wide = fg.core.trees.map_leaves(lambda x: x.to(dtype), layer)
            x = plain.layer_step(config, wide, x, turn, (k, v), positions, seen, attend, mix)
            new.append((k[:, :, -1].clone(), v[:, :, -1].clone()))
        normed = plain.last_norm(config, weights._replace(norm=weights.norm.to(dtype)), x[:, -1])
        return Right(ids, F.linear(normed, weights.head.to(dtype)), new), mix.margin

    def ids(self, num_reqs: int, generator: torch.Generator) -> Tensor:
        """(R * new,) int64: random tokens."""
        count = num_reqs * self.new
        ids = torch.randint(self.config.vocab_size, (count,), generator=generator)
        return ids.to(self.device)

    def drawn(
        self, num_reqs: int, away: Sequence[Tensor] = ()
    ) -> Iterable[tuple[Tensor, Tensor]]:  # fmt: skip
        """Random k and v of each layer, (R, S, K, D), the same each time; of `Right.away` less."""
        shape = (num_reqs, self.context, self.config.num_kv_heads, self.config.head_dim)
        for i in range(self.config.num_layers):
            generator = torch.Generator(self.device).manual_seed(i)
            k, v = (
                torch.randn(shape, device=self.device, dtype=BF16, generator=generator)
                for _ in range(2)
            )
            yield k * PEAKED - away[i][:, None] if away else k * PEAKED, v

    def fill(self, views: Views, away: Sequence[Tensor] = ()) -> None:
        """Put them there."""
        drawn = self.drawn(len(views[0][0]), away)
        for (k, v), (new_k, new_v) in zip(views, drawn, strict=True):
            k.copy_(new_k)
            v.copy_(new_v)


class Hiding:
    """Attention over keys that the queries of this step turn away from, but for their own.

    Among hundreds of random keys a token's own has hardly a say, and a way that does not read what
    it has just written would pass. So from all others is taken what makes their scores less by the
    logarithm of their sum, as random ones have it: its own is as likely as all of them.
    """

    def __init__(self) -> None:
        self.away: list[Tensor] = []

    def __call__(self, q_RHTD: Tensor, k_RKSD: Tensor, v_RKSD: Tensor, seen: Tensor) -> Tensor:
        R, K, S, D = k_RKSD.shape
        mean_RKD = q_RHTD.reshape(R, K, -1, D).mean(2)
        less = math.log(S) + PEAKED**2 / 2
        scale = less * math.sqrt(D) / mean_RKD.square().sum(-1, keepdim=True)
        self.away.append((mean_RKD * scale).to(BF16))
        k = (k_RKSD.to(BF16) - self.away[-1][:, :, None]).to(k_RKSD.dtype)
        k[:, :, -1] = k_RKSD[:, :, -1]
        return plain.folded_heads(q_RHTD, k, v_RKSD, seen)


class Looped:
    """Experts one after the other, in any dtype; and how near a choice was, (R,)."""

    def __init__(self, margin: Tensor) -> None:
        self.margin = margin

    def __call__(self, weights: Any, x_TE: Tensor, chosen: int, normalized: bool) -> Tensor:
        logits_TX = F.linear(x_TE, weights.router)
        best = logits_TX.topk(chosen + 1, -1).values
        self.margin = torch.minimum(self.margin, best[:, -2] - best[:, -1])
        expert_TC, share_TC = plain.route(weights.router, x_TE, chosen, normalized)
        out_TE = torch.zeros_like(x_TE)
        for i in expert_TC.unique().tolist():
            gate, up = (F.linear(x_TE, w[i]) for w in (weights.w_gate, weights.w_up))
            share_T1 = (share_TC * (expert_TC == i)).sum(-1, keepdim=True)
            out_TE += F.linear(F.silu(gate) * up, weights.w_down[i]) * share_T1
        return out_TE


def make_bench(
    name: str, context: int, batches: Iterable[int], device: str, backend: str | None
) -> Bench:
    """Weights and memory, drawn on the device."""
    torch.manual_seed(0)
    model, batches = MODELS[name], tuple(batches)
    config = model.config
    params = random_params(config, device, BF16, model.family, even=True)
    size = max(batches) * context * config.num_kv_heads * config.head_dim
    memory = [
        (torch.zeros(size, device=device, dtype=BF16), torch.zeros(size, device=device, dtype=BF16))
        for _ in range(config.num_layers)
    ]
    return Bench(
        model, context, batches, device, backend, fg.ops.lay_side_by_side(params), memory
    )  # fmt: skip
