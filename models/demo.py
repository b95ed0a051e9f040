"""The main job on real text, in every mode, held to bare `forward`: python -m fngraph.models.demo

Two processes share the model with: torchrun --nproc-per-node 2 -m fngraph.models.demo --tp 2

Exits with 1 where a mode writes other tokens than `llama.forward` does for one request at a time,
or where steps that the mode should have replayed ran otherwise.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from statistics import median
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import track
from rich.rule import Rule

import fngraph as fg
from fngraph.models.command import file, mistake, processes, run, whole
from fngraph.models.families import llama
from fngraph.models.generate import (
    BLOCK_SIZE,
    PROMPTS,
    ladder,
    own_part,
    pick_device,
    plan,
    read_prompts,
    reference,
)
from fngraph.models.serving.loop import gather, serve, stream
from fngraph.models.serving.policy import Policy
from fngraph.models.serving.ranks.circles import ONE, Ranks, make_ranks
from fngraph.models.serving.ranks.following import follow, over_ranks
from fngraph.models.serving.requests import State
from fngraph.models.serving.steps import Steps, make_steps
from fngraph.models.serving.tally import Tally
from fngraph.models.serving.texts.display import show, texts
from fngraph.models.weights.checkpoint import BYTES, load_checkpoint

# what a mode promises, (decode batches, mixed batches); written out, since it judges fngraph's own
MEANING = {
    "NONE": ("NONE", "NONE"),
    "PIECEWISE": ("PIECEWISE", "PIECEWISE"),
    "FULL_DECODE_ONLY": ("FULL", "NONE"),
    "FULL": ("FULL", "FULL"),
    "FULL_AND_PIECEWISE": ("FULL", "PIECEWISE"),
}
SIZES = ladder(32)


class Run(NamedTuple):
    """What one mode did.

    Attributes:
        modes: its name.
        texts: what each request got.
        expected: how many steps should have run as FULL, PIECEWISE, NONE.
        shares: the shares of steps that did.
        ms: the median step, scheduling and sampling included.
    """

    modes: str
    texts: dict[int, tuple[int, ...]]
    expected: Counter[str]
    shares: dict[str, float]
    ms: float


def expected_mode(modes: str, spec: fg.BatchSpec) -> str:
    """How a step has to run, by the meaning of `modes` and the ladder alone."""
    decode, mixed = MEANING[modes]
    if spec.num_tokens > SIZES[-1]:
        return "NONE"
    return mixed if spec.query_len is None else decode


def captured(
    modes: str, params: llama.Params, state: State, policy: Policy, recorder: str, ranks: Ranks,
    *, progress: bool,
) -> tuple[Steps, Any]:  # fmt: skip
    """The steps of a mode, and their cache."""
    device, num_blocks = params.embed.device, state.pool.num_blocks
    cache = llama.init_cache(params.config, num_blocks, block_size=BLOCK_SIZE, device=device)
    steps = make_steps(
        llama.forward, params, cache, policy, modes=modes, sizes=SIZES, recorder=recorder,
        progress=progress,
    )  # fmt: skip
    return over_ranks(steps, ranks), cache


def run_mode(
    modes: str, params: llama.Params, state: State, policy: Policy, recorder: str, out: Console,
    ranks: Ranks = ONE,
) -> Run:  # fmt: skip
    """Capture, generate everything, and report on the way."""
    out.print(Rule(modes))
    steps, cache = captured(modes, params, state, policy, recorder, ranks, progress=out.is_terminal)
    served = list(show(serve(steps, cache, state, policy), state, out, transient=True))
    (step,) = steps.captured
    print(step.table.as_text(), step.stats.as_text(), Tally(served).as_text(), sep="\n\n")
    ms = median(one.seconds for one in served) * 1e3
    print(f"\n{ms:.2f} ms a step (median of {len(served)})\n")
    return Run(
        modes=modes,
        texts=gather(stream(served)),
        expected=Counter(expected_mode(modes, one.spec) for one in served),
        shares={name: step.stats.share(name) for name in ("FULL", "PIECEWISE", "NONE")},
        ms=ms,
    )


def verdict(run: Run, wanted: dict[int, tuple[int, ...]]) -> tuple[str, bool]:
    """The last line of a mode, and whether all is well."""
    wrong = [i for i, tokens in wanted.items() if run.texts.get(i) != tokens]
    total = run.expected.total()
    off = [
        f"{name} should be {run.expected[name] / total:.1%}"
        for name, share in run.shares.items()
        if abs(share - run.expected[name] / total) > 1e-9
    ]
    tokens = f"tokens differ in requests {wrong}" if wrong else "tokens equal"
    shares = ", ".join(f"{name} {share:.1%}" for name, share in run.shares.items())
    tail = f"; WRONG: {', '.join(off)}" if off else ""
    return f"{run.modes:<18}  {tokens}  {run.ms:6.2f} ms a step  {shares}{tail}", not (wrong or off)


def main(argv: list[str] | None = None) -> int:
    """The command; 0 where every mode kept its word."""
    flags = parser().parse_args(argv)
    with processes(parser(), tp=flags.tp) as mesh:
        return compare(flags, mesh)


def compare(flags: argparse.Namespace, mesh: fg.Mesh) -> int:
    """The command, in each of its processes; the first reports."""
    device = pick_device(mesh.device)
    recorder = "cuda" if device.startswith("cuda") else "tape"
    out = Console(width=100 if not sys.stdout.isatty() else None)
    try:
        _, params = load_checkpoint(flags.checkpoint, device=device)
        own = own_part(params, mesh)
        prompts = read_prompts(flags.prompts)
        state, policy = plan(prompts, flags.max_new, max_tokens=SIZES[-1], max_reqs=8)
    except (ValueError, fg.errors.RankError) as error:
        mistake(parser(), error)
    ranks = make_ranks(mesh)
    if not ranks.leads:
        for modes in MEANING:
            follow(*captured(modes, own, state, policy, recorder, ranks, progress=False))
        return 0
    where = f"{device} with the {recorder}"
    where += f", shared by {mesh.size} processes" if mesh.size > 1 else ""
    print(f"{len(prompts)} prompts, {flags.max_new} tokens each, on {where}")

    requests = [job.request for job in state.waiting]
    began = time.perf_counter()
    wanted = {
        request.id: reference(params, request.prompt, request.max_new)
        for request in track(requests, "bare forward", console=out, transient=True)
    }
    print(f"bare forward, one request at a time: {time.perf_counter() - began:.1f} s\n")
    runs = [run_mode(modes, own, state, policy, recorder, out, ranks) for modes in MEANING]

    out.print(Rule("text"))
    out.print(texts(requests, runs[-1].texts))
    out.print(Rule("against bare forward, one request at a time"))
    lines = [verdict(run, wanted) for run in runs]
    print("\n".join(line for line, _ in lines))
    return 0 if all(well for _, well in lines) else 1


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    p = argparse.ArgumentParser(prog="python -m fngraph.models.demo")
    p.add_argument("--prompts", type=file, default=PROMPTS, help="a file, one prompt a line")
    p.add_argument("--max-new", type=whole(1, 1 << 16), default=96, help="tokens for each prompt")
    p.add_argument("--checkpoint", type=file, default=BYTES, help="a model over bytes")
    p.add_argument(
        "--tp",
        type=whole(1, 1 << 10),
        default=1,
        help="processes that share the model, by torchrun",
    )
    return p


if __name__ == "__main__":
    run(main)
