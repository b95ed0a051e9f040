"""Random programs of loops: bodies of any kind, swapped carries, nested, over state and closures.

A program is written once against four functions: those of `fngraph`, or `Python`, which are loops
over Python's own control flow and know nothing of ours.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

Values = list[Tensor]  # each float64 (2, 3)
Step = Callable[[Any, Values, Tensor], Values]  # (functions, values, count) to more values
SHAPE = (2, 3)


def _while_loop(cond: Any, body: Any, carry: Any) -> Any:
    while bool(cond(carry)):
        carry = body(carry)
    return carry


def _fori_loop(lower: Any, upper: Any, body: Any, carry: Any) -> Any:
    for i in range(int(lower), int(upper)):
        carry = body(
            torch.tensor(i, device=upper.device if torch.is_tensor(upper) else None), carry
        )
    return carry


def _scan(body: Any, carry: Any, xs: Any, length: Any = None, reverse: bool = False) -> Any:
    n = xs.shape[0] if xs is not None else length
    ys: list[Any] = [None] * n
    for i in reversed(range(n)) if reverse else range(n):
        carry, ys[i] = body(carry, None if xs is None else xs[i])
    return carry, torch.stack(ys) if n else torch.zeros(0, *SHAPE, dtype=torch.float64)


def _cond(pred: Any, a: Any, b: Any, *args: Any) -> Any:
    return a(*args) if bool(pred) else b(*args)


Python = SimpleNamespace(while_loop=_while_loop, fori_loop=_fori_loop, scan=_scan, cond=_cond)

# --- steps: each draws its numbers when the program is made, and none when it runs ----------------


def _pick(rng: random.Random, many: int) -> int:
    return rng.randrange(many)


def _pointwise(rng: random.Random, many: int, depth: int) -> Step:
    i, j, k = (_pick(rng, many) for _ in range(3))
    scale = rng.choice([0.5, -1.0, 2.0])
    does = rng.choice([
        lambda v: torch.tanh(v[i] + v[j]),
        lambda v: v[i] * scale - v[j],
        lambda v: torch.where(v[i] > v[j], v[j], v[k]),
        lambda v: v[i].abs().clamp(max=3) + torch.tensor([scale, 1.0, 0.0], dtype=torch.float64),
        lambda v: torch.sin(v[i] @ v[j].t()) @ v[k],
        lambda v: torch.cat([v[i][1:], v[j][:1]]),
        lambda v: v[i].flip(0).t().contiguous().t(),
        lambda v: v[i].index_put((torch.tensor([1], device=v[i].device),), v[j][0]),
        lambda v: v[i].cumsum(1) / 4,
        lambda v: v[i].contiguous().view(3, 2).t().reshape(2, 3),
    ])  # fmt: skip
    return lambda fg, v, n: [torch.tanh(does(v))]


def _in_place(rng: random.Random, many: int, depth: int) -> Step:
    """What it has made itself it may write."""
    i, j, row = _pick(rng, many), _pick(rng, many), rng.randrange(2)

    def step(fg: Any, v: Values, n: Tensor) -> Values:
        x = v[i].clone()
        view = x[row]
        view.add_(v[j][1 - row])
        return [x.mul_(0.5)]

    return step


def _predicate(rng: random.Random, many: int) -> Callable[[Values], Tensor]:
    i, j = _pick(rng, many), _pick(rng, many)
    return lambda v: (v[i] - v[j]).sum() > 0


def _cond_step(rng: random.Random, many: int, depth: int) -> Step:
    pred = _predicate(rng, many)
    a, b = (body_of(rng, many, depth - 1, outs=2) for _ in "ab")
    return lambda fg, v, n: list(
        fg.cond(pred(v), lambda x: a(fg, [*v, x], n), lambda x: b(fg, [*v, x], n), v[0] * 2)
    )


def _while_step(rng: random.Random, many: int, depth: int) -> Step:
    """As many turns as the count says, or fewer, once a value says so."""
    width = rng.choice([1, 2, 3])
    start = [_pick(rng, many) for _ in range(width)]
    turn = body_of(rng, many + width, depth - 1, outs=width)
    early = rng.random() < 0.5

    def step(fg: Any, v: Values, n: Tensor) -> Values:
        def go(carry: Any) -> Tensor:
            more = carry["i"] < n
            return more & (carry["v"][0].sum() < 2.5) if early else more

        def body(carry: Any) -> Any:
            return {"i": carry["i"] + 1, "v": tuple(turn(fg, [*v, *carry["v"]], n))}

        init = {"i": torch.zeros_like(n), "v": tuple(v[i] for i in start)}
        return list(fg.while_loop(go, body, init)["v"])

    return step


def _fori_step(rng: random.Random, many: int, depth: int) -> Step:
    turns, by_tensor = rng.choice([0, 1, 2, 5]), rng.random() < 0.4
    width = rng.choice([1, 2])
    start = [_pick(rng, many) for _ in range(width)]
    turn = body_of(rng, many + width + 1, depth - 1, outs=width)

    def step(fg: Any, v: Values, n: Tensor) -> Values:
        def body(i: Tensor, carry: Any) -> Any:
            number = torch.ones(SHAPE, dtype=torch.float64, device=n.device) * i / 8
            return turn(fg, [*v, number, *carry], n)

        return fg.fori_loop(0, n if by_tensor else turns, body, [v[i] for i in start])

    return step


def _scan_step(rng: random.Random, many: int, depth: int) -> Step:
    turns, reverse, of_xs = rng.choice([0, 1, 2, 4]), rng.random() < 0.5, rng.random() < 0.7
    width = rng.choice([1, 2])
    start, rows = [_pick(rng, many) for _ in range(width)], _pick(rng, many)
    turn = body_of(rng, many + width + of_xs, depth - 1, outs=width + 1)

    def step(fg: Any, v: Values, n: Tensor) -> Values:
        def body(carry: Any, x: Any) -> Any:
            *new, y = turn(fg, [*v, *carry, *([] if x is None else [x])], n)
            return new, y

        init = [v[i] for i in start]
        if of_xs:
            xs = torch.stack([v[rows] * k for k in range(turns)] or [v[rows]])[:turns]
            last, ys = fg.scan(body, init, xs, reverse=reverse)
        else:
            last, ys = fg.scan(body, init, None, length=turns, reverse=reverse)
        return [*last, ys.sum(0) + (ys[-1] if turns else 0)]

    return step


_LEAVES = [_pointwise, _pointwise, _pointwise, _in_place]
_LOOPS = [_while_step, _fori_step, _scan_step, _cond_step]


def body_of(rng: random.Random, many: int, depth: int, outs: int, loops: int = 1) -> Any:
    """A function of `many` values to `outs` of them or of its own: some as they came, or twice."""
    kinds = [rng.choice(_LEAVES) for _ in range(rng.randint(1, 3))]
    if depth > 0:
        kinds += [rng.choice(_LOOPS) for _ in range(loops)]
        rng.shuffle(kinds)
    steps, now = [], many
    for kind in kinds:
        step = kind(rng, now, depth)
        steps.append(step)
        now += {_scan_step: 0}.get(kind, 0) + _gives(step, now)
    chosen = [rng.choice([_pick(rng, now), rng.randrange(many, now)]) for _ in range(outs)]

    def run(fg: Any, values: Sequence[Tensor], n: Tensor) -> Values:
        made = list(values)
        for step in steps:
            made += step(fg, made, n)
        return [made[i] for i in chosen]

    return run


def _gives(step: Step, many: int) -> int:
    """How many values a step gives."""
    return len(step(Python, [torch.zeros(SHAPE, dtype=torch.float64)] * many, torch.tensor(0)))


def forward_of(seed: int) -> Callable[[Any], Callable[..., Any]]:
    """A program: of the functions to `forward(w, state, x)`, which updates `state`."""
    rng = random.Random(seed)
    run = body_of(rng, 5, depth=rng.choice([1, 1, 2]), outs=3, loops=rng.choice([1, 2]))

    def with_functions(fg: Any) -> Callable[..., Any]:
        def forward(w: Any, state: Any, x: Any) -> Any:
            values = [w["a"], w["b"].t(), state["s"], state["t"], x["x"]]
            result, *new = run(fg, values, x["n"])
            kept = (values[0], values[1], values[4])  # which are not ours to return
            s, t = (v.clone() if any(v is x for x in kept) else v for v in new)
            return result * 1, {"s": s, "t": t}

        return forward

    return with_functions


def given(seed: int, device: Any, turns: int) -> tuple[Any, Any, Any]:
    """Arguments: weights, state, and what is new at a call."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device)

    w = {"a": draw(2, 3), "b": draw(3, 2)}
    n = torch.tensor(turns, device=device)
    return w, {"s": draw(2, 3), "t": draw(2, 3)}, {"x": draw(2, 3), "n": n}
