"""Greedy text for many prompts at once: python -m models.generate --prompts FILE --modes ...

`models.serve` is the loop; `reference` is what it has to agree with, token by token.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import fngraph as fg
from models import llama
from models.blocks import blocks_for
from models.checkpoint import BYTES, load_checkpoint
from models.policy import Policy
from models.requests import State, start, submit
from models.serve import serve
from models.show import show
from models.steps import make_steps
from models.tally import Tally

BLOCK_SIZE = 16
PROMPTS = Path(__file__).parent / "prompts.txt"


@torch.no_grad()
def reference(params: llama.Params, prompt: Sequence[int], max_new: int) -> tuple[int, ...]:
    """The same tokens from `llama.forward` itself: one request, its own cache, no scheduler."""
    device = params.embed.device
    num_blocks = blocks_for(len(prompt) + max_new, BLOCK_SIZE)
    cache = llama.init_cache(params.config, num_blocks, block_size=BLOCK_SIZE, device=device)
    tokens, computed = list(prompt), 0
    for _ in range(max_new):
        batch = alone(tokens, computed, num_blocks, device)
        logits_RV, cache = llama.forward(params, cache, batch)
        computed = len(tokens)
        tokens.append(int(logits_RV.argmax()))
    return tuple(tokens[len(prompt) :])


def alone(
    tokens: Sequence[int], computed: int, num_blocks: int, device: torch.device
) -> llama.Batch:
    """The batch of one request whose token i lives in slot i, from token `computed` on."""
    new = torch.arange(computed, len(tokens))
    batch = llama.Batch(
        token_ids=torch.tensor(tokens[computed:]),
        positions=new,
        slot_mapping=new,
        seq_lens=torch.tensor([len(tokens)], dtype=torch.int32),
        query_start_loc=torch.tensor([0, len(new)], dtype=torch.int32),
        block_tables=torch.arange(num_blocks, dtype=torch.int32)[None],
        logits_indices=torch.tensor([len(new) - 1]),
        spec=fg.BatchSpec(len(new), 1),
    )
    return to_device(batch, device)


def to_device(batch: llama.Batch, device: torch.device) -> llama.Batch:
    """The batch for a bare `llama.forward`; fngraph moves batches by itself."""
    moved: dict[str, Any] = {
        n: x.to(device) if isinstance(x, Tensor) else x for n, x in vars(batch).items()
    }
    return llama.Batch(**moved)


def make_step(
    params: llama.Params, cache: Any, limits: fg.Limits, *, modes: str, progress: bool = False,
    **options: Any,
) -> Any:  # fmt: skip
    """`llama.forward`, weights bound and graphs captured; `options` are `fg.graphify`'s."""
    fast = fg.graphify(llama.forward, modes=modes, donate="cache", stage="batch", **options)
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


def to_tokens(text: str) -> tuple[int, ...]:
    """UTF-8 bytes."""
    return tuple(text.encode("utf-8"))


def plan(
    prompts: Sequence[str], max_new: int, *, max_tokens: int, max_reqs: int, **policy: Any
) -> tuple[State, Policy]:
    """A state with every prompt waiting, and a policy just wide enough for each of them.

    The cache has blocks for `max_reqs` of the longest, so that rows, not blocks, run out first.
    """
    tokens = [to_tokens(prompt) for prompt in prompts]
    B = max(blocks_for(len(t) + max_new, BLOCK_SIZE) for t in tokens)
    wide = Policy(max_tokens, max_reqs, B, BLOCK_SIZE, **policy)
    state = start(B * max_reqs, wide)
    for t in tokens:
        state = submit(state, wide, t, max_new)
    return state, wide


def main(argv: list[str] | None = None) -> None:
    """The command."""
    flags = parser().parse_args(argv)
    device = pick_device(flags.device)
    config, params = load_checkpoint(flags.checkpoint, device=device)
    state, policy = plan(
        read_prompts(flags.prompts),
        flags.max_new,
        max_tokens=flags.max_tokens,
        max_reqs=flags.max_reqs,
        query_lens=(1, 1 + flags.drafts) if flags.drafts else (1,),
    )
    cache = llama.init_cache(config, state.pool.num_blocks, block_size=BLOCK_SIZE, device=device)
    steps = make_steps(
        llama.forward, params, cache, policy, modes=flags.modes, recorder=flags.recorder,
        sizes=ladder(flags.max_tokens), progress=True,
    )  # fmt: skip
    tally = Tally()
    for _ in show(tally.watch(serve(steps, cache, state, policy)), state, Console()):
        pass
    print(f"\n\n{tally.as_text()}")


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    p = argparse.ArgumentParser(prog="python -m models.generate")
    p.add_argument("--prompts", type=Path, default=PROMPTS, help="a file, one prompt a line")
    p.add_argument("--modes", default="FULL_AND_PIECEWISE", help="NONE, PIECEWISE, FULL, ...")
    p.add_argument("--max-new", type=int, default=96, help="tokens for each prompt")
    p.add_argument("--max-tokens", type=int, default=32, help="token budget of a step")
    p.add_argument("--max-reqs", type=int, default=8, help="requests in a step")
    p.add_argument("--drafts", type=int, default=0, help="draft tokens a step, by prompt lookup")
    p.add_argument("--recorder", choices=["tape", "cuda"], help="default: as the device allows")
    p.add_argument("--device", help="default: cuda where there is one")
    p.add_argument("--checkpoint", type=Path, default=BYTES)
    return p


if __name__ == "__main__":
    main()
