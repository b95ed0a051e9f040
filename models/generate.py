"""Text for many prompts at once: python -m fngraph.models.generate --model FOLDER

`fngraph.models.serving.loop` is the loop; `reference` is what it has to agree with, token by token.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import optree
import torch
from rich.console import Console
from torch import Tensor

import fngraph as fg
from fngraph.models.command import (
    STOPPED,
    device as device_of,
    file,
    folder,
    mistake,
    processes,
    real,
    run,
    whole,
)
from fngraph.models.families import llama
from fngraph.models.serving.blocks import blocks_for
from fngraph.models.serving.loop import serve
from fngraph.models.serving.policy import Policy
from fngraph.models.serving.ranks.circles import make_ranks
from fngraph.models.serving.ranks.following import over_ranks
from fngraph.models.serving.requests import GREEDY, State, start
from fngraph.models.serving.sampling import Settings
from fngraph.models.serving.steps import make_steps
from fngraph.models.serving.submitting import Stop, submit
from fngraph.models.serving.tally import Tally
from fngraph.models.serving.texts.display import show
from fngraph.models.text import BYTE_TEXT, Text, read_text
from fngraph.models.weights import loading
from fngraph.models.weights.checkpoint import BYTES, load_checkpoint
from fngraph.models.weights.sharding import shard

BLOCK_SIZE = 16
PROMPTS = Path(__file__).parent / "prompts.txt"


@torch.no_grad()
def reference(
    params: Any, prompt: Sequence[int], max_new: int, family: Any = llama
) -> tuple[int, ...]:
    """The new tokens of one request from bare `forward`: its own cache, no scheduler."""
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
    Batch: Any = llama.Batch, **own: Tensor,
) -> Any:  # fmt: skip
    """The batch of one request whose token i lives in slot i, from token `computed` on.

    Args:
        own: leaves of the family's, in place of these or beside them.
    """
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
        **own,
    }
    query_len = 1 if computed and len(new) == 1 else None
    return select(Batch, leaves, fg.BatchSpec(len(new), 1, query_len=query_len), device)


def select(
    Batch: Any, leaves: Mapping[str, Any], spec: fg.BatchSpec, device: torch.device | str = "cpu"
) -> Any:
    """The `Batch` of a family, of those leaves that it has."""
    names = {field.name for field in dataclasses.fields(Batch)} - {"spec"}
    return Batch(**{n: x.to(device) for n, x in leaves.items() if n in names}, spec=spec)


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
        ValueError: none at all, or a file that is no text.
    """
    try:
        prompts = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: {error.reason} at {error.start}") from None
    if not prompts:
        raise ValueError(f"{path} holds no prompt; write one a line")
    return prompts


def plan(
    prompts: Sequence[str], max_new: int, *, max_tokens: int, max_reqs: int,
    text: Text = BYTE_TEXT, stop: Sequence[str] = (), n: int = 1, settings: Settings = GREEDY,
    **policy: Any,
) -> tuple[State, Policy]:  # fmt: skip
    """A state with every prompt waiting, `n` times, and a policy just wide enough for each of them.

    Texts end where `text.stops` says, and at `stop`. The cache has blocks for `max_reqs` of the
    longest, so that rows, not blocks, run out first.
    """
    tokens = [text.encode(prompt) for prompt in prompts]
    B = max(blocks_for(len(t) + max_new, BLOCK_SIZE) for t in tokens)
    wide = Policy(max_tokens, max_reqs, B, BLOCK_SIZE, **policy)
    state = start(B * max_reqs, wide)
    ends: list[Stop] = [*sorted(text.stops), *stop]
    for t in tokens:
        state = submit(
            state, wide, t, max_new, stop=ends, decode=text.decode, n=n, settings=settings
        )
    return state, wide


def main(argv: list[str] | None = None) -> int:
    """The command; `STOPPED` where Ctrl-C ended it, with the texts so far."""
    flags = parser().parse_args(argv)
    with processes(parser(), device=flags.device, tp=flags.tp) as mesh:
        return write(flags, mesh)


def write(flags: argparse.Namespace, mesh: fg.Mesh) -> int:
    """The command, in each of its processes; the first has the texts."""
    device = pick_device(mesh.device)
    try:
        check_flags(flags, device)
        family, config, params, text = read_model(flags, mesh)
        states = family_states(family)
        state, policy = plan(
            read_prompts(flags.prompts),
            flags.max_new,
            max_tokens=flags.max_tokens,
            max_reqs=flags.max_reqs,
            text=text,
            stop=flags.stop,
            n=flags.n,
            settings=Settings(flags.temperature, seed=flags.seed),
            query_lens=(1, 1 + flags.drafts) if flags.drafts else (1,),
            share=not states,
            num_slots=flags.max_reqs if states else 0,
        )
        check_length(config, state)
        num_blocks = state.pool.num_blocks
        shape = {"block_size": BLOCK_SIZE, "num_slots": flags.max_reqs, "dtype": params.embed.dtype}
        check_memory(family, config, num_blocks, device=device, **shape)
    except (loading.CheckpointError, ValueError, fg.errors.RankError) as error:
        mistake(parser(), error)
    cache = family.init_cache(config, num_blocks, device=device, **shape)
    drawn = ("sampling",) if flags.temperature else ()
    ranks = make_ranks(mesh)
    steps = make_steps(
        family.forward, params, cache, policy, *states, *drawn, modes=flags.modes,
        recorder=flags.recorder, sizes=ladder(flags.max_tokens), progress=ranks.leads,
    )  # fmt: skip
    served = serve(over_ranks(steps, ranks), cache, state, policy)
    if not ranks.leads:
        return len(list(served))  # none
    tally = Tally()
    shown, status = show(tally.watch(served), state, Console(), decode=text.decode), 0
    try:
        for _ in shown:
            pass
    except KeyboardInterrupt:
        shown.close()  # prints what there is, where it has not
        status = STOPPED
    print(f"\n\n{tally.as_text()}")
    return status


def check_flags(flags: argparse.Namespace, device: str) -> None:
    """Refuse flags that do not go together.

    Raises:
        ValueError: which, and what to pass.
    """
    if flags.drafts >= flags.max_tokens:
        raise ValueError(
            f"--drafts {flags.drafts}: a step has {flags.max_tokens} tokens, and one is no draft. "
            f"Pass at most {flags.max_tokens - 1}, or --max-tokens {flags.drafts + 1}"
        )
    if flags.recorder == "cuda" and not device.startswith("cuda"):
        raise ValueError(f"--recorder cuda: the model is on {device}. Leave it out")


def check_memory(family: Any, config: Any, num_blocks: int, **where: Any) -> None:
    """Refuse a cache that is larger than the memory it would be in.

    Raises:
        ValueError: both in GB.
    """
    cache = family.init_cache(config, num_blocks, **{**where, "device": "meta"})
    asked, there = sum(x.nbytes for x in optree.tree_leaves(cache)), memory_of(where["device"])
    if asked > there:
        raise ValueError(
            f"a cache of {num_blocks} blocks takes {asked / 1e9:.1f} GB, and there are "
            f"{there / 1e9:.1f} GB. Lower --max-new or --max-reqs"
        )


def memory_of(device: str) -> int:
    """Bytes that are free on a GPU, or all that a host has."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_length(config: Any, state: State) -> None:
    """Refuse texts that would be longer than a model has positions.

    Raises:
        ValueError: one that could be.
    """
    most = getattr(config, "max_len", 0)
    requests = [job.request for job in state.waiting]
    longest = max(requests, key=lambda request: len(request.prompt) + request.max_new)
    if most and len(longest.prompt) + longest.max_new > most:
        raise ValueError(
            f"prompt {longest.id} has {len(longest.prompt)} tokens, and {longest.max_new} more are "
            f"beyond the model's {most} positions. Pass --max-new {most - len(longest.prompt)}"
        )


def family_states(family: Any) -> tuple[str, ...]:
    """What its batches have beside the paged fields."""
    names = {field.name for field in dataclasses.fields(family.Batch)}
    return ("states",) if "state_slots" in names else ()


def read_model(flags: argparse.Namespace, mesh: fg.Mesh) -> tuple[Any, Any, Any, Text]:
    """The family, config, weights and text of `--model`, or of the checkpoint over bytes: this
    process's part of them.

    Raises:
        fg.errors.RankError: a model that the processes of the mesh cannot share.
    """
    if flags.model is None:
        params = own_part(load_checkpoint(flags.checkpoint, device=mesh.device)[1], mesh)
        return llama, params.config, params, BYTE_TEXT
    family, text = loading.family(flags.model, generative=True), read_text(flags.model)
    if mesh.size == 1:
        return family, *family.load(flags.model, device=mesh.device), text
    return family, *family.load(flags.model, mesh=mesh), text


def own_part(params: llama.Params, mesh: fg.Mesh) -> llama.Params:
    """This process's part of a checkpoint over bytes.

    Raises:
        fg.errors.RankError: a model that the processes of the mesh cannot share.
    """
    return params if mesh.size == 1 else shard(params, llama.specs(params.config), mesh)


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    p = argparse.ArgumentParser(prog="python -m fngraph.models.generate")
    p.add_argument("--prompts", type=file, default=PROMPTS, help="a file, one prompt a line")
    p.add_argument("--modes", default="FULL_AND_PIECEWISE", choices=list(fg.Mode.__members__))
    p.add_argument("--max-new", type=whole(1, 1 << 20), default=96, help="tokens for each prompt")
    p.add_argument("--stop", type=str, nargs="*", default=(), help="texts that end one")
    p.add_argument("--n", type=whole(1, 1 << 12), default=1, help="texts of each prompt")
    p.add_argument(
        "--temperature", type=real(0, 1 << 10), default=0.0, help="0: the likeliest tokens"
    )
    p.add_argument("--seed", type=whole(0), help="of the first text; default: its number")
    p.add_argument(
        "--max-tokens", type=whole(1, 1 << 16), default=32, help="token budget of a step"
    )
    p.add_argument("--max-reqs", type=whole(1, 1 << 12), default=8, help="requests in a step")
    p.add_argument("--drafts", type=whole(0), default=0, help="draft tokens, by prompt lookup")
    p.add_argument(
        "--tp",
        type=whole(1, 1 << 10),
        default=1,
        help="processes that share the model, by torchrun",
    )
    p.add_argument("--recorder", choices=["tape", "cuda"], help="default: as the device allows")
    p.add_argument("--device", type=device_of, help="default: cuda where there is one")
    p.add_argument("--checkpoint", type=file, default=BYTES, help="one file, a model over bytes")
    p.add_argument("--model", type=folder, help="in its place: a Hugging Face folder")
    return p


if __name__ == "__main__":
    run(main)
