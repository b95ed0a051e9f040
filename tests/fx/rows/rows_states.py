"""New values of donated state that padding reaches, and those that it does not.

Each takes `(p, s, b)`: weights, state and batch of the toys.
"""

from __future__ import annotations

from typing import Any

import torch
from rows_given import T_of, masked, real, rows

Outputs = dict[str, Any]

MIXED_STATE: Outputs = {
    "state + sum": lambda p, s, b: {**s, "total": s["total"] + rows(p, b).sum(0)},
    "seen index_add ones": lambda p, s, b: {
        **s,
        "seen": s["seen"].index_add(0, b.token_ids, torch.ones_like(b.token_ids)),
    },
    "seen[ids] += 1": lambda p, s, b: {
        **s,
        "seen": s["seen"].index_put((b.token_ids,), s["seen"][b.token_ids] + 1),
    },
    "seen[ids] = 1, in place": lambda p, s, b: (s["seen"].index_fill_(0, b.token_ids, 1), s)[1],
    "setitem by slot % V": lambda p, s, b: (
        s["total"].__setitem__(b.slot_mapping % 11, rows(p, b)),
        s,
    )[1],
    "setitem by slot, -1 is the last row": lambda p, s, b: (
        s["total"].__setitem__(b.slot_mapping.clamp(max=10), rows(p, b)),
        s,
    )[1],
    "scatter of rows": lambda p, s, b: {
        **s,
        "total": s["total"].scatter(0, b.token_ids[:, None].expand(-1, 8), rows(p, b) + 2),
    },
    "index_copy": lambda p, s, b: {
        **s,
        "total": s["total"].index_copy(0, b.token_ids, rows(p, b) + 2),
    },
    "moving average of a mean": lambda p, s, b: {
        **s,
        "total": s["total"] * 0.9 + rows(p, b).mean(0) * 0.1,
    },
    "count of tokens by T": lambda p, s, b: {**s, "seen": s["seen"] + T_of(b)},
    "max of lengths by R": lambda p, s, b: {**s, "seen": s["seen"] + b.seq_lens.shape[0]},
    "grad step of a mean loss": (
        lambda p, s, b: {
            **s,
            "total": s["total"]
            - torch.func.grad(lambda w: (w[b.token_ids] + rows(p, b)).square().mean())(s["total"]),
        }
    ),
}

KEPT_STATE: Outputs = {
    "a step counter": lambda p, s, b: {**s, "seen": s["seen"] + 1},
    "masked index_add": lambda p, s, b: {
        **s,
        "total": s["total"].index_add(0, b.token_ids, masked(p, b)),
    },
    "masked index_add in place": lambda p, s, b: (
        s["seen"].index_add_(0, b.token_ids, real(b).long()),
        s,
    )[1],
    "masked sum": lambda p, s, b: {**s, "total": s["total"] + masked(p, b).sum(0)},
    "one hot of slots": lambda p, s, b: {
        **s,
        "total": s["total"]
        + (torch.arange(11) == b.slot_mapping[:, None]).float().t() @ masked(p, b),
    },
    "count by the mask": lambda p, s, b: {**s, "seen": s["seen"] + real(b).sum()},
    "where a token occurs": (
        lambda p, s, b: {
            **s,
            "seen": torch.where(
                ((torch.arange(11) == b.token_ids[:, None]) & real(b)[:, None]).any(0), 1, s["seen"]
            ),
        }
    ),
    "grad step of a masked loss": (
        lambda p, s, b: {
            **s,
            "total": s["total"]
            - torch.func.grad(
                lambda w: (
                    torch.where(real(b)[:, None], w[b.token_ids] + rows(p, b), 0).square().sum()
                )
            )(s["total"]),
        }
    ),
}
