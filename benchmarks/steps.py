"""A step of the byte-level model in every mode, beside bare `forward`: python -m benchmarks steps

Wall time of one call with its device work finished. Logits are compared in the same run.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

import fngraph as fg
from benchmarks.record import median_ms, write
from fngraph.models.families import llama
from fngraph.models.weights.checkpoint import load_checkpoint

MODES = ("NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL", "FULL_AND_PIECEWISE")
BLOCK_SIZE, CONTEXT = 16, 128
BACKEND_HELP = "of attention; what suits the device, if none is named"


def attention_of(step: Any) -> str:
    """The backend that a captured step's attention runs on."""
    return step.compiled.lowered.calls[0].backend.name


def batch_of(num_reqs: int, new: int, device: torch.device | str) -> llama.Batch:
    """`num_reqs` requests of CONTEXT tokens, the last `new` of which run in this step."""
    per = CONTEXT // BLOCK_SIZE
    blocks = torch.arange(num_reqs * per, dtype=torch.int32).view(num_reqs, per)
    positions = torch.arange(CONTEXT - new, CONTEXT).repeat(num_reqs)
    owner = torch.arange(num_reqs).repeat_interleave(new)
    slots = blocks[owner, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    starts = torch.arange(0, num_reqs * new + 1, new)
    leaves = {
        "token_ids": torch.randint(256, (num_reqs * new,)),
        "positions": positions,
        "slot_mapping": slots,
        "seq_lens": torch.full((num_reqs,), CONTEXT, dtype=torch.int32),
        "query_start_loc": starts.int(),
        "block_tables": blocks,
        "logits_indices": starts[1:] - 1,
    }
    spec = fg.BatchSpec(num_reqs * new, num_reqs, query_len=1 if new == 1 else None)
    return llama.Batch(**{k: v.to(device) for k, v in leaves.items()}, spec=spec)


@torch.no_grad()
def measure(device: str, repeats: int) -> list[dict[str, Any]]:
    """One row a mode and batch: what it ran as, ms, ms of bare forward, largest difference."""
    _, params = load_checkpoint(device=device)
    limits = fg.Limits(max_tokens=128, max_reqs=8, B=CONTEXT // BLOCK_SIZE)
    rows = []
    for modes in MODES:
        cache = llama.init_cache(params.config, 64, block_size=BLOCK_SIZE, device=device)
        fast = fg.graphify(
            llama.forward, modes=modes, donate="cache", stage="batch", sizes=(1, 2, 4, 8, 64, 128)
        )
        began = time.perf_counter()
        step = fast.bind(params).capture(cache, limits, progress=False)
        capture_s = time.perf_counter() - began
        for num_reqs, new in ((1, 1), (8, 1), (7, 1), (8, 16)):
            batch = batch_of(num_reqs, new, device)
            got, _ = step(cache, batch)
            plain = tuple((k.clone(), v.clone()) for k, v in cache)
            want, _ = llama.forward(params, plain, batch)
            rows.append(
                {
                    "modes": modes, "attention": attention_of(step),
                    "batch": f"{num_reqs} x {new}",
                    "ran as": str(step.dispatch(batch.spec).mode),
                    "ms": median_ms(lambda: step(cache, batch), repeats),  # noqa: B023
                    "bare forward ms": median_ms(
                        lambda: llama.forward(params, plain, batch), repeats  # noqa: B023
                    ),
                    "largest difference": float((got - want).abs().max()),
                    "keys": len(step), "trace and capture s": capture_s,
                }
            )  # fmt: skip
    return rows


def main(argv: list[str]) -> int:
    """Print the rows; `--json` keeps them."""
    p = argparse.ArgumentParser(prog="python -m benchmarks steps")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--repeats", type=int, default=200)
    p.add_argument("--json", type=Path)
    flags = p.parse_args(argv)
    rows = measure(flags.device, flags.repeats)
    print(*rows[0], sep=" | ")
    for row in rows:
        print(*(f"{v:.4g}" if isinstance(v, float) else v for v in row.values()), sep=" | ")
    if flags.json:
        write(flags.json, rows)
    return 0
