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
        left_R, table_RB = batch.left.long(), batch.block_tables
        last_R = left_R - 1
        turn_K1 = torch.arange(turns, device=left_R.device)[:, None]
        ahead_KR = torch.minimum(turn_K1, last_R.clamp(min=0))  # who is done stays there
        place_KR = batch.positions + ahead_KR
        block_KR = (place_KR // block_size).clamp(0, table_RB.shape[1] - 1)
        slot_KR = table_RB.gather(1, block_KR.t()).t() * block_size + place_KR % block_size
        length_KR = (batch.seq_lens + ahead_KR).int()
        no_slot, undrawn, no_token = (  # as scalars each turn would make them anew
            torch.full_like(last_R, value) for value in (-1, UNDRAWN, 0)
        )
        same = {name: x for name, x in vars(batch).items() if name in copied}
        same["logits_indices"] = batch.logits_indices[:, None]  # (R, 1), as in a single step

        def going(carry: dict[str, Any]) -> Tensor:
            return ~carry["done"].all()

        def turn(carry: dict[str, Any]) -> dict[str, Any]:
            at, done_R = carry["turn"], carry["done"]
            of_turn = lambda of_each_KR: of_each_KR.index_select(0, at)[0]  # noqa: E731
            own = {
                "token_ids": carry["token"],
                "positions": of_turn(place_KR),
                "slot_mapping": torch.where(done_R, no_slot, of_turn(slot_KR)),
                "seq_lens": of_turn(length_KR),
            }
            if "states" in more:
                own["state_slots"] = torch.where(done_R, no_slot, batch.state_slots)
            logits_R1V, cache = forward(
                *held, carry["cache"], inner(**same, **own, spec=batch.spec)
            )
            places_R = own["positions"] if greedy else own["positions"] + 1  # of the token drawn
            ids_R = sample(logits_R1V, batch, places_R[:, None], greedy=greedy)[:, 0]
            drawn_R = torch.where(done_R, undrawn, ids_R)
            ends_R = (ids_R[:, None] == batch.stop_ids).any(-1)  # FAILED is among them
            done_R = done_R | ends_R | (at >= last_R)
            return {
                "cache": cache,
                "turn": at + 1,
                "token": torch.where(done_R, no_token, ids_R),
                "done": done_R,
                "ids": carry["ids"].index_copy_(0, at, drawn_R[None]),
            }

        start = {
            "cache": cache,
            "turn": torch.zeros_like(turn_K1[0]),
            "token": batch.token_ids,
            "done": left_R < 1,
            "ids": torch.full_like(place_KR, UNDRAWN),
        }
        end = fg.while_loop(going, turn, start)
        return end["ids"].t(), end["cache"]

    def step(params: Any, cache: Any, batch: Any) -> tuple[Tensor, Any]:
        return decode((params,), forward, cache, batch)

    def adapted(params: Any, adapters: Any, cache: Any, batch: Any) -> tuple[Tensor, Any]:
        return decode((params, adapters), lora.adapted(forward), cache, batch)

    chosen = adapted if "adapters" in more else step
    chosen.__annotations__["batch"] = batch_type(*more)
    return chosen
