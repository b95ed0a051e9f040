"""Greedy text for many prompts at once: python -m models.generate --model FOLDER --modes ...

`serve` is the whole loop; `reference` is what it has to agree with, token by token.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import fngraph as fg
from models import llama, loading
from models.checkpoint import BYTES, load_checkpoint
from models.requests import Served, State, blocks_for, start, submit
from models.schedule import advance, schedule
from models.show import show
from models.text import BYTES as BYTES_TEXT, Text, read_text

BLOCK_SIZE = 16
PROMPTS = Path(__file__).parent / "prompts.txt"
Step = Callable[[Any, llama.Batch], tuple[Tensor, Any]]  # cache, batch -> logits, cache


@torch.no_grad()
def serve(
    step: Step, cache: Any, state: State, limits: fg.Limits, Batch: Any = llama.Batch
) -> Iterator[Served]:
    """Run until every request has its tokens, a step at a time. The cache is used up.

    A family with recurrent states has `limits.max_reqs` slots for them, in batches of its own.
    """
    slots: dict[int, int] = {}
    while state.live:
        began = time.perf_counter()
        state, batch = schedule(state, limits)
        slots = take_slots(slots, [request.id for request in state.running], limits.max_reqs)
        rows = state.running[: batch.spec.num_reqs]
        leaves = vars(batch) | {"state_slots": torch.tensor([slots[row.id] for row in rows])}
        logits_RV, cache = step(cache, select(Batch, leaves, batch.spec))
        state = advance(state, batch, logits_RV.argmax(-1).tolist())
        yield Served(state, batch.spec, time.perf_counter() - began)


def take_slots(slots: Mapping[int, int], running: Sequence[int], count: int) -> dict[int, int]:
    """The slot of each running request: its old one, or the lowest that is free."""
    kept = {i: slots[i] for i in running if i in slots}
    free = iter(sorted(set(range(count)) - set(kept.values())))
    return kept | {i: next(free) for i in running if i not in kept}


@torch.no_grad()
def reference(
    params: Any, prompt: Sequence[int], max_new: int, family: Any = llama
) -> tuple[int, ...]:
    """The same tokens from bare `forward`: one request, its own cache, no scheduler."""
    device = params.embed.device
    num_blocks = blocks_for(len(prompt) + max_new, BLOCK_SIZE)
    cache = family.init_cache(
        params.config, num_blocks, block_size=BLOCK_SIZE, num_slots=1, device=device,
        dtype=params.embed.dtype,
    )  # fmt: skip
    tokens, computed = list(prompt), 0
    for _ in range(max_new):
        batch = alone(tokens, computed, num_blocks, device, family.Batch)
        logits_RV, cache = family.forward(params, cache, batch)
        computed = len(tokens)
        tokens.append(int(logits_RV.argmax()))
    return tuple(tokens[len(prompt) :])


def alone(
    tokens: Sequence[int], computed: int, num_blocks: int, device: torch.device | str,
    Batch: Any = llama.Batch,
) -> Any:  # fmt: skip
    """The batch of one request whose token i lives in slot i, from token `computed` on."""
    new = torch.arange(computed, len(tokens))
    leaves = {
        "token_ids": torch.tensor(tokens[computed:]),
        "positions": new,
        "slot_mapping": new,
        "seq_lens": torch.tensor([len(tokens)], dtype=torch.int32),
        "query_start_loc": torch.tensor([0, len(new)], dtype=torch.int32),
        "block_tables": torch.arange(num_blocks, dtype=torch.int32)[None],
        "state_slots": torch.tensor([0]),
        "logits_indices": torch.tensor([len(new) - 1]),
    }
    query_len = 1 if computed and len(new) == 1 else None
    return select(Batch, leaves, fg.BatchSpec(len(new), 1, query_len=query_len), device)


def select(
    Batch: Any, leaves: Mapping[str, Any], spec: fg.BatchSpec, device: torch.device | str = "cpu"
) -> Any:
    """The `Batch` of a family, of those leaves that it has."""
    names = {field.name for field in dataclasses.fields(Batch)} - {"spec"}
    return Batch(**{n: x.to(device) for n, x in leaves.items() if n in names}, spec=spec)


def make_step(
    params: Any, cache: Any, limits: fg.Limits, *, modes: str, forward: Any = llama.forward,
    progress: bool = False, **options: Any,
) -> Any:  # fmt: skip
    """`forward`, weights bound and graphs captured; `options` are `fg.graphify`'s."""
    fast = fg.graphify(forward, modes=modes, donate="cache", stage="batch", **options)
    return fast.bind(params).capture(cache, limits, progress=progress)


def ladder(top: int) -> tuple[int, ...]:
    """1, 2, 4, ... and `top`: few graphs to capture, and no step beyond them."""
    return (*(1 << i for i in range((top - 1).bit_length())), top)


def pick_device(name: str | None = None) -> str:
    """`name`, or cuda where there is one.

    On the CPU it leaves one thread: the layers are too small to share, and where others keep
    the cores busy two threads took 16 times as long as one.
    """
    device = name or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cpu":
        torch.set_num_threads(1)
    return device


def read_prompts(path: Path) -> list[str]:
    """One prompt a line; empty lines are skipped.

    Raises:
        ValueError: none at all.
    """
    prompts = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    if not prompts:
        raise ValueError(f"{path} holds no prompt; write one a line")
    return prompts


def plan(
    prompts: Sequence[str], max_new: int, *, max_tokens: int, max_reqs: int, text: Text = BYTES_TEXT
) -> tuple[State, fg.Limits]:
    """A state with every prompt waiting, and limits just wide enough for each of them.

    The cache has blocks for `max_reqs` of the longest, so that rows, not blocks, run out first.
    """
    tokens = [text.encode(prompt) for prompt in prompts]
    B = max(blocks_for(len(t) + max_new, BLOCK_SIZE) for t in tokens)
    limits = fg.Limits(max_tokens, max_reqs, B=B)
    state = start(num_blocks=B * max_reqs, block_size=BLOCK_SIZE)
    for t in tokens:
        state = submit(state, t, max_new, limits)
    return state, limits


def main(argv: list[str] | None = None) -> None:
    """The command."""
    flags = parser().parse_args(argv)
    device = pick_device(flags.device)
    family, config, params, text = read_model(flags, device)
    state, limits = plan(
        read_prompts(flags.prompts),
        flags.max_new,
        max_tokens=flags.max_tokens,
        max_reqs=flags.max_reqs,
        text=text,
    )
    cache = family.init_cache(
        config, len(state.free), block_size=BLOCK_SIZE, num_slots=limits.max_reqs, device=device,
        dtype=params.embed.dtype,
    )  # fmt: skip
    step = make_step(
        params, cache, limits, modes=flags.modes, forward=family.forward, recorder=flags.recorder,
        sizes=ladder(flags.max_tokens), progress=True,
    )  # fmt: skip
    served = serve(step, cache, state, limits, family.Batch)
    for _ in show(served, state, Console(), decode=text.decode):
        pass
    print(f"\n\n{step.stats.as_text()}")


def read_model(flags: argparse.Namespace, device: str) -> tuple[Any, Any, Any, Text]:
    """The family, config, weights and text of `--model`, or of the checkpoint over bytes."""
    if flags.model is None:
        return llama, *load_checkpoint(flags.checkpoint, device=device), BYTES_TEXT
    family = loading.family(flags.model, generative=True)
    return family, *family.load(flags.model, device=device), read_text(flags.model)


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    p = argparse.ArgumentParser(prog="python -m models.generate")
    p.add_argument("--prompts", type=Path, default=PROMPTS, help="a file, one prompt a line")
    p.add_argument("--modes", default="FULL_AND_PIECEWISE", help="NONE, PIECEWISE, FULL, ...")
    p.add_argument("--max-new", type=int, default=96, help="tokens for each prompt")
    p.add_argument("--max-tokens", type=int, default=32, help="token budget of a step")
    p.add_argument("--max-reqs", type=int, default=8, help="requests in a step")
    p.add_argument("--recorder", choices=["tape", "cuda"], help="default: as the device allows")
    p.add_argument("--device", help="default: cuda where there is one")
    p.add_argument("--checkpoint", type=Path, default=BYTES, help="one file, a model over bytes")
    p.add_argument("--model", type=Path, help="in its place: a Hugging Face folder")
    return p


if __name__ == "__main__":
    main()
