"""Functions of one body, in which a pass matches or does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import toys
from test_graphify import Model
from torch import Tensor

import fngraph as fg
from fngraph.models.families.rope import Turn, rotate, turn_by

EPS = 1e-5
H, D, F = 2, 4, 6  # of toys.E = 8
BF16, F32 = torch.bfloat16, torch.float32


def params(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(shape, generator=generator).to(dtype)  # noqa: E731
    p = {"w": draw(toys.V, toys.E), "g": draw(toys.E), "h": draw(D), "eps": torch.tensor(EPS)}
    p |= {"wq": draw(8, toys.E), "wk": draw(4, toys.E), "wv": draw(4, toys.E), "b": draw(8)}
    p |= {f"{x}_proj.weight": draw(4, toys.E) for x in "qkv"}
    p |= {f"{x}_proj.bias": draw(4) for x in "qkv"}
    one = torch.tensor(0.01)
    p |= {"one": one, "same": one, "other scale": one.clone()}
    p |= {"eight": draw(4, toys.E).to(torch.float8_e4m3fn)}
    return p | {"w_gate": draw(F, toys.E), "w_up": draw(F, toys.E), "other": draw(F, toys.E)}


Body = Callable[[dict[str, Tensor], Tensor], Any]


def forward_of(body: Body) -> Callable[..., Any]:
    def forward(params: Any, state: Any, batch: toys.Batch) -> Any:
        return body(params, params["w"][batch.token_ids]), state

    return forward


def model_of(body: Body, given: Any) -> Model:
    return Model(forward_of(body), given, {"calls": torch.zeros(1)})


def changed(x: Tensor, write: Callable[[Tensor], Any]) -> Tensor:
    write(x)
    return x


def angles(x: Tensor, width: int = D // 2) -> tuple[Tensor, Tensor]:
    angle = x[:, None, :width] * 2
    return angle.cos(), angle.sin()


def turn(x: Tensor, width: int = D // 2) -> Turn:
    return turn_by(*angles(x, width))


def in_float32(q: Tensor, by: Turn) -> Tensor:
    """As towers turn heads in half precision."""
    return rotate(q.float(), by).to(q.dtype)


def by_row(p: Any, y: Tensor, times: int = 1) -> list[Tensor]:
    """Products in fp8 that round their input each."""
    made = [fg.ops.quantize_fp8_rows(y) for _ in range(times)]
    return [fg.ops.scaled_linear(*one, p["eight"], p["one"], y.dtype).sin() for one in made]


def known(p: Any, y: Tensor, *scales: str, **more: Tensor) -> list[Tensor]:
    """The same, by known scales."""
    of = [*(p[name] for name in scales), *more.values()]
    made = [(fg.ops.quantize_fp8(y, scale), scale) for scale in of]
    return [fg.ops.scaled_linear(*one, p["eight"], p["one"], y.dtype).sin() for one in made]
