"""Several tokens a request from one launch: the loop on the device, as a function to be captured.

Each turn is a decode step: `forward` over one token a request, and the draw, whose token is the
next turn's. Positions, slots and lengths go on by one; a request that has drawn a token that stops
it, none at all, or its last one is done: it writes nowhere from then on (slot -1). The loop ends
when all are. So the tokens are those of as many single steps, whatever `turns` is.

A batch has one token a request, so its fields have R where others have T; beside them come how many
tokens each may draw, and the tokens that stop it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fngraph as fg
from fngraph.models.families import lora
from fngraph.models.serving.batches import batch_type
from fngraph.models.serving.sampling import UNDRAWN, sample


def many_forward(
    forward: Callable[[Any, Any, Any], tuple[Tensor, Any]], turns: int, block_size: int, *more: str
) -> Callable[..., tuple[Tensor, Any]]:
    """`forward` and the draw, again and again: what is captured. Gives ids (R, turns), and cache.

    Args:
        turns: the most tokens of a request.
        more: as for `served_forward`, "many" among them.
    """
    greedy = "sampling" not in more
    inner = batch_type(*(name for name in more if name not in ("many", "sampling")))
    copied = {"query_start_loc", "block_tables", "logits_indices", "adapter_ids"}

    def decode(held: tuple[Any, ...], forward: Any, cache: Any, batch: Any) -> tuple[Tensor, Any]:
        valid_R = batch.left > 0  # padding has nothing left
        left_R, last_block = batch.left, batch.block_tables.shape[1] - 1
        column = torch.arange(turns, device=left_R.device)
        same = {name: x for name, x in vars(batch).items() if name in copied}

        def going(carry: dict[str, Any]) -> Tensor:
            return (valid_R & ~carry["done"]).any()

        def turn(carry: dict[str, Any]) -> dict[str, Any]:
            done_R, drawn_R = carry["done"] | ~valid_R, carry["count"]
            ahead_R = torch.minimum(drawn_R, (left_R - 1).clamp(min=0))  # who is done stays there
            places_R = batch.positions + ahead_R
            block_R1 = (places_R // block_size).clamp(0, last_block)[:, None]
            start_R = batch.block_tables.gather(1, block_R1)[:, 0].long() * block_size
            own = {
                "token_ids": torch.where(valid_R, carry["token"], 0),
                "positions": places_R,
                "slot_mapping": torch.where(done_R, -1, start_R + places_R % block_size),
                "seq_lens": batch.seq_lens + ahead_R,
            }
            if "states" in more:
                own["state_slots"] = torch.where(done_R, -1, batch.state_slots)
            logits_RV, cache = forward(*held, carry["cache"], inner(**same, **own, spec=batch.spec))
            ids_R = sample(logits_RV, batch, places_R + 1, greedy=greedy)
            here_RK = (column == drawn_R[:, None]) & ~done_R[:, None]
            stopped_R = (ids_R[:, None] == batch.stop_ids).any(-1)
            count_R = drawn_R + (~done_R).int()
            return {
                "cache": cache,
                "token": torch.where(done_R, carry["token"], ids_R.clamp(min=0)),
                "count": count_R,
                "done": done_R | stopped_R | (ids_R < 0) | (count_R >= left_R),
                "ids": torch.where(here_RK, ids_R[:, None], carry["ids"]),
            }

        start = {
            "cache": cache,
            "token": batch.token_ids,
            "count": torch.zeros_like(left_R),
            "done": left_R < 1,
            "ids": torch.full_like(column, UNDRAWN).expand(left_R.shape[0], -1).clone(),
        }
        end = fg.while_loop(going, turn, start)
        return end["ids"], end["cache"]

    def step(params: Any, cache: Any, batch: Any) -> tuple[Tensor, Any]:
        return decode((params,), forward, cache, batch)

    def adapted(params: Any, adapters: Any, cache: Any, batch: Any) -> tuple[Tensor, Any]:
        return decode((params, adapters), lora.adapted(forward), cache, batch)

    chosen = adapted if "adapters" in more else step
    chosen.__annotations__["batch"] = batch_type(*more)
    return chosen
