"""Reads and writes by two indices that are broadcast against one another, for random programs.

One varies along some rows, the other along others, so that an element is written for each pair.
"""

from __future__ import annotations

import torch
from rows_chains import Stage, chain, counted, literal, same
from rows_idioms import zeroed

WIDTH = 8
TARGETS: Stage = (
    lambda _, g: g.x + 0,
    lambda _, g: g.w * 1,
    lambda _, g: torch.zeros(12, WIDTH, device=g.x.device),
    lambda _, g: torch.zeros(g.lens.shape[0], WIDTH, device=g.x.device),
    lambda _, g: torch.zeros(g.x.shape[0], g.lens.shape[0], device=g.x.device),
    lambda _, g: g.x.t() + 0,
    lambda _, g: g.total,
)
FIRST: Stage = (
    lambda v, g: (v, counted(g)[:, None]),
    lambda v, g: (v, counted(g, v.shape[0])[:, None]),
    lambda v, g: (v, g.place[:, None]),
    lambda v, g: (v, g.place[:, None] % WIDTH),
    lambda v, g: (v, torch.where(g.real, g.ids % 7, 7)[:, None]),
    lambda v, g: (v, g.ids[:, None]),
    lambda v, g: (v, literal(g, [[1], [2]])),
    lambda v, g: (v, torch.where(torch.eye(g.x.shape[0], device=g.x.device) > 0, 5, 0)),
)
SECOND: Stage = (
    lambda v, g: (*v, g.lens[None] % WIDTH),
    lambda v, g: (*v, torch.where(g.lens > 0, g.lens % 7, 7)[None]),
    lambda v, g: (*v, g.lens[None] * 0),
    lambda v, g: (*v, g.place[None] % WIDTH),
    lambda v, g: (*v, torch.where(g.real, g.ids % 7, 7)[None]),
    lambda v, g: (*v, g.starts[None, :-1].clamp(max=7)),
    lambda v, g: (*v, counted(g)[None]),
    lambda v, g: (*v, counted(g, v[0].shape[1])[None]),
    lambda v, g: (*v, literal(g, [[1, 3]])),
    lambda v, g: (*v, literal(g, 2)),
)
VALUES: Stage = (
    lambda v, g: (*v, literal(g, 5.0)),
    lambda v, g: (*v, zeroed(g.x, g.real)[:, :1]),
    lambda v, g: (*v, torch.where(g.lens > 0, 1.0, 0.0)[None]),
    lambda v, g: (*v, zeroed(g.x, g.real)[:, :1] * torch.where(g.lens > 0, 1.0, 0.0)[None]),
    lambda v, g: (*v, zeroed(g.x, g.real)[:, 0][None]),
    lambda v, g: (*v, g.x[:, :1]),
)
DONE: Stage = (
    lambda v, g: v[0].index_put((v[1], v[2]), v[3]),
    lambda v, g: v[0].index_put((v[1], v[2]), v[3], accumulate=True),
    lambda v, g: v[0].index_put_((v[1], v[2]), v[3]),
    lambda v, g: v[0].index_put_((v[1], v[2]), v[3], accumulate=True),
    lambda v, g: v[0][v[1], v[2]],
    lambda v, g: v[0].index_put((v[1],), v[3], accumulate=True),
)
TAKEN: Stage = (
    same,
    same,
    lambda v, g: v[1:],
    lambda v, g: v[:, :7],
    lambda v, g: v[1:7].sum(0),
    lambda v, g: v[:, 1:].sum(1),
)
PAIRS = [chain("x w ids place real lens starts total", TARGETS, FIRST, SECOND, VALUES, DONE, TAKEN)]
