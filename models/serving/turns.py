"""Several tokens a request from one launch: the loop on the device, as a function to be captured.

Each turn is a decode step: `forward` over one token a request, and the draw, whose token is the
next turn's. Positions, slots and lengths go on by one; a request that has drawn a token that stops
it, none at all, or its last one is done: it writes nowhere from then on (slot -1). The loop ends
when all are. So the tokens are those of as many single steps, whatever `turns` is.

A batch has one token a request, so its fields have R where others have T; beside them come how many
tokens each may draw, and the tokens that stop it. The host may end a launch at the token that it is
at by a flag, which each turn reads (`fngraph.models.serving.halting`).

Where drafts are verified, a turn is a verify step: the drafts are what followed a text's last few
tokens where they first occurred, looked up in a leaf that holds the texts so far, and each turn
writes what it keeps behind them. Its fields have R and Q where others have T. Blocks are there for
the drafts too, so that all of them are written.
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

Forward = Callable[..., tuple[Tensor, Any]]
OUTER = ("many", "lookup", "sampling")  # names of fields that are not the model's
# what each turn's batch has as it is
COPIED = {"query_start_loc", "block_tables", "logits_indices", "adapter_ids"}


def many_forward(
    forward: Forward, turns: int, block_size: int, *more: str, drafts: int = 0, ngram: int = 3
) -> Forward:
    """`forward` and the draw, again and again: what is captured. Gives ids (R, turns), and cache.

    It takes a flag (1,) behind the weights: the turn that finds it raised is the last.

    Args:
        turns: the most tokens of a request.
        more: as for `served_forward`, "many" among them, and "lookup" where there are drafts.
        drafts: of each turn and request; 0: a turn is a decode step.
        ngram: tokens that must have occurred before, for what followed them to be a draft.
    """
    if drafts:
        decode = verifying(turns, block_size, *more, drafts=drafts, ngram=ngram)
    else:
        decode = decoding(turns, block_size, *more)

    def step(params: Any, halt: Tensor, cache: Any, batch: Any) -> tuple[Tensor, Any]:
        return decode((params,), halt, forward, cache, batch)

    def adapted(
        params: Any, adapters: Any, halt: Tensor, cache: Any, batch: Any
    ) -> tuple[Tensor, Any]:
        return decode((params, adapters), halt, lora.adapted(forward), cache, batch)

    chosen = adapted if "adapters" in more else step
    chosen.__annotations__["batch"] = batch_type(*more)
    return chosen


def decoding(turns: int, block_size: int, *more: str) -> Forward:
    """A token each turn. All places are known ahead: a turn only picks its own."""
    greedy = "sampling" not in more
    inner = batch_type(*(name for name in more if name not in OUTER))

    def decode(
        held: tuple[Any, ...], halt: Tensor, forward: Any, cache: Any, batch: Any
    ) -> tuple[Tensor, Any]:
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
        same = {name: x for name, x in vars(batch).items() if name in COPIED}
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
            done_R = done_R | ends_R | (at >= last_R) | halt
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

    return decode


def verifying(turns: int, block_size: int, *more: str, drafts: int, ngram: int) -> Forward:
    """A verify step each turn: as many tokens as its drafts have guessed, and one."""
    greedy = "sampling" not in more
    inner = batch_type(*(name for name in more if name not in OUTER))

    def decode(
        held: tuple[Any, ...], halt: Tensor, forward: Any, cache: Any, batch: Any
    ) -> tuple[Tensor, Any]:
        table_RB, left_R = batch.block_tables, batch.left.long()
        ahead_Q = torch.arange(1 + drafts, device=left_R.device)
        same = {name: x for name, x in vars(batch).items() if name in COPIED}
        if "adapters" in more:
            same["adapter_ids"] = batch.adapter_ids.reshape(-1)

        def going(carry: dict[str, Any]) -> Tensor:
            return ~carry["done"].all()

        def turn(carry: dict[str, Any]) -> dict[str, Any]:
            text_RL, length_R = carry["text"], carry["length"]
            left_R, done_R = carry["left"], carry["done"]
            guess_RK = look_up(text_RL, length_R, ngram, drafts)
            last_R1 = text_RL.gather(1, (length_R - 1).clamp(min=0)[:, None])
            place_RQ = (length_R[:, None] - 1 + ahead_Q).clamp(min=0)  # below 0 in padding
            block_RQ = (place_RQ // block_size).clamp(max=table_RB.shape[1] - 1)
            slot_RQ = table_RB.gather(1, block_RQ) * block_size + place_RQ % block_size
            token_RQ = torch.cat([last_R1, guess_RK], 1).long()
            own = {
                "token_ids": token_RQ.masked_fill(done_R[:, None], 0).reshape(-1),
                "positions": place_RQ.reshape(-1),
                "slot_mapping": slot_RQ.masked_fill(done_R[:, None], -1).reshape(-1),
                "seq_lens": (length_R + drafts).int(),
            }
            logits_RQV, cache = forward(
                *held, carry["cache"], inner(**same, **own, spec=batch.spec)
            )
            ids_RQ = sample(logits_RQV, batch, place_RQ + 1, greedy=greedy)
            kept_R = 1 + (ids_RQ[:, :-1] == guess_RK).long().cumprod(1).sum(1)
            ends_RQ = (ids_RQ[..., None] == batch.stop_ids[:, None]).any(-1)  # FAILED among them
            until_R = torch.where(ends_RQ, ahead_Q + 1, 2 + drafts).amin(1)
            new_R = torch.minimum(torch.minimum(kept_R, until_R), left_R).masked_fill(done_R, 0)
            return {
                "cache": cache,
                "text": written(text_RL, ids_RQ.int(), length_R, new_R),
                "length": length_R + new_R,
                "left": left_R - new_R,
                "done": done_R | (until_R <= new_R) | (left_R <= new_R) | halt,
                "ids": written(carry["ids"], ids_RQ, carry["count"], new_R),
                "count": carry["count"] + new_R,
            }

        start = {
            "cache": cache,
            "text": batch.text,
            "length": batch.seq_lens.long() - drafts,
            "left": left_R,
            "done": left_R < 1,
            "ids": left_R.new_full((left_R.shape[0], turns), UNDRAWN),
            "count": torch.zeros_like(left_R),
        }
        end = fg.while_loop(going, turn, start)
        return end["ids"], end["cache"]

    return decode


def look_up(text: Tensor, lengths: Tensor, ngram: int, count: int) -> Tensor:
    """What followed the last tokens of each text where they first occurred: drafts, (R, count).

    Behind the text's end, or where it has fewer tokens than that, they repeat its last one. What
    they are never changes a text.

    Args:
        text: (R, L) int32, each from its start; what lies behind its end is not looked at.
        lengths: (R,) int64.
    """
    L, ngram = text.shape[1], min(ngram, text.shape[1])
    at_N = torch.arange(-ngram, 0, device=text.device)
    last_RN = text.gather(1, (lengths[:, None] + at_N).clamp(min=0))
    starts = L - ngram + 1
    same_RW = text[:, :starts] == last_RN[:, :1]
    for i in range(1, ngram):
        same_RW = same_RW & (text[:, i : i + starts] == last_RN[:, i : i + 1])
    first_R = torch.where(same_RW, torch.arange(starts, device=text.device), starts).amin(1)
    place_RK = first_R[:, None] + ngram + torch.arange(count, device=text.device)
    found_RK = text.gather(1, place_RK.clamp(max=L - 1))
    return torch.where(place_RK < lengths[:, None], found_RK, last_RN[:, -1:])


def written(rows: Tensor, new: Tensor, at: Tensor, count: Tensor) -> Tensor:
    """Rows (R, L) with the first `count` of `new` (R, Q) from `at` on; both (R,) int64."""
    of_RL = torch.arange(rows.shape[1], device=rows.device) - at[:, None]
    there_RL = (of_RL >= 0) & (of_RL < count[:, None])
    return torch.where(there_RL, new.gather(1, of_RL.clamp(0, new.shape[1] - 1)), rows)
