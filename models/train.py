"""Train the byte-level Llama on English of Python itself: python -m fngraph.models.train

One captured step, again and again. After each, all that the next one reads is on disk
(`training/saving.py`): a run that was killed goes on as if nothing had been, by the same command:

    python -m fngraph.models.train --device cuda --compile pieces --out bytes.safetensors

Last come the weights, those whose running average did best on the held-out text; a card that says
what they are and how they came to be; and their losses as a picture.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import hashlib
import platform
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

import fngraph as fg
from fngraph.models.command import (
    device as device_of,
    new_file,
    new_folder,
    real,
    run as run_command,
    whole,
)
from fngraph.models.families import llama
from fngraph.models.training.adamw import AdamW, cosine, init
from fngraph.models.training.english import HELD_OUT_EVERY, batch_at, corpus, cut
from fngraph.models.training.flat import Flat, packed, unpacked
from fngraph.models.training.picture import draw_losses
from fngraph.models.training.saving import Run, blank_run, load_run, save_run
from fngraph.models.training.step import make_train_step
from fngraph.models.training.texts import dropped, evaluate, make_loss
from fngraph.models.weights import naming
from fngraph.models.weights.checkpoint import BYTES, load_checkpoint, save_checkpoint
from fngraph.models.weights.loading import CheckpointError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
OF_A_RUN = ("steps", "batch", "accumulate", "context", "lr", "weight_decay", "drop", "looks",
            "dtype", "checkpoint", "compile", "seed")  # fmt: skip
COLUMNS = (
    TextColumn("step {task.completed}"),
    BarColumn(),
    TextColumn("loss {task.fields[loss]:.3f}, held out {task.fields[held_out]:.3f}"),
    TimeRemainingColumn(),
)


def main(argv: list[str] | None = None) -> None:
    """Train, or go on with it, then save the weights and the card that says what they are."""
    flags = parser().parse_args(argv)
    torch.set_num_threads(flags.threads)
    flags.dtype = flags.dtype or ("bfloat16" if flags.device.startswith("cuda") else "float32")
    config = tiny_bytes()
    train, held_out = (torch.frombuffer(bytearray(x), dtype=torch.uint8) for x in corpus())
    for text, what in ((held_out, "held-out text"), (train[flags.context :], "text")):
        if flags.context >= len(text):
            parser().error(f"--context {flags.context}: the {what} has {len(text)} bytes")
    try:
        run, best = fit(config, train, cut(held_out, flags.context), flags)
    except CheckpointError as error:
        parser().error(str(error))
    save_checkpoint(flags.out, config, {n: w.bfloat16() for n, w in best.items()})
    draw_losses(flags.out.with_suffix(".png"), run.losses, run.looks, flags.out.name)
    words = " ".join(sys.argv[1:] if argv is None else argv)
    told = card(config, run, flags, train, held_out, f"python -m fngraph.models.train {words}")
    flags.out.with_suffix(".md").write_text(told)
    print(told)


def fit(
    config: llama.Config, train: Tensor, held_NS: Tensor, flags: argparse.Namespace
) -> tuple[Run, dict[str, Tensor]]:
    """A run to its last step, from wherever it is; and the averaged weights that did best.

    Raises:
        CheckpointError: what is in the run's folder is of another run.
    """
    fast, facts = captured(config, flags), facts_of(config, train, flags)
    run = begun(config, facts, flags)
    held_NS = held_NS.to(flags.device)
    fields: dict[str, Any] = {"loss": float("nan"), "held_out": run.best}
    with Progress(*COLUMNS) as progress:
        bar = progress.add_task("training", total=flags.steps, completed=run.step, **fields)
        unsaved: list[Tensor] = []  # losses, still on the device
        began = time.monotonic() - run.seconds
        for step in range(run.step, flags.steps):
            batch = batch_at(train, step, flags.batch * flags.accumulate, flags.context, flags.seed)
            if flags.accumulate > 1:
                batch = batch.unflatten(0, (flags.accumulate, flags.batch))
            params, opt, metrics = fast(run.params, run.opt, batch.to(flags.device))
            run = run._replace(params=params, opt=opt)
            unsaved.append(metrics["loss"])
            looked = (step + 1) * flags.looks // flags.steps > step * flags.looks // flags.steps
            if looked or len(unsaved) == flags.save_every:
                run = kept(run, unsaved, time.monotonic() - began)
                run = look(run, config, held_NS, flags) if looked else run
                save_run(flags.run / "run.safetensors", run, facts)
                unsaved = []
                fields = {"loss": run.losses[-1].item(), "held_out": run.best}
            progress.update(bar, completed=step + 1, **fields)
    _, best = load_checkpoint(flags.run / "best.safetensors")
    return run, naming.named(best)


def captured(config: llama.Config, flags: argparse.Namespace) -> Any:
    """The step, as graphs."""
    loss = make_loss(config, dtype=DTYPES[flags.dtype], checkpoint=flags.checkpoint)
    settings = AdamW(weight_decay=flags.weight_decay, decays=Flat(True, False))
    draw = functools.partial(dropped, share=flags.drop, seed=flags.seed)
    step = make_train_step(
        loss, settings, cosine(flags.lr, flags.steps), accumulate=flags.accumulate,
        draw=draw if flags.drop else None,
    )  # fmt: skip
    return fg.graphify(
        step, donate=("params", "opt"), stage="batch", modes="FULL", compile=flags.compile,
    )  # fmt: skip


def begun(config: llama.Config, facts: Mapping[str, Any], flags: argparse.Namespace) -> Run:
    """The run of the folder, or one before its first step."""
    named = naming.named(llama.init_params(config, seed=flags.seed, device=flags.device))
    params = packed(named)
    new = blank_run(params, init(params, average=True))
    path = flags.run / "run.safetensors"
    return load_run(path, new, facts) if path.exists() else new


def kept(run: Run, losses: list[Tensor], seconds: float) -> Run:
    """The run with the losses of its last steps; waits for the device."""
    all_losses = torch.cat([run.losses, torch.stack(losses).cpu()])
    return run._replace(losses=all_losses, seconds=seconds)


def look(run: Run, config: llama.Config, held_NS: Tensor, flags: argparse.Namespace) -> Run:
    """The run with one more look at the held-out text. The average is written where it is the best.

    Written before the run is: a look that was cut short is looked again, and writes the same.
    """
    average = unpacked(llama.blank(config), run.opt.average)
    loss = evaluate(average, held_NS, flags.batch)
    if loss < run.best:
        save_checkpoint(flags.run / "best.safetensors", config, naming.named(average))
    return run._replace(looks=torch.cat([run.looks, torch.tensor([[run.step, loss]])]))


def facts_of(config: llama.Config, train: Tensor, flags: argparse.Namespace) -> dict[str, Any]:
    """What a run that goes on must agree with."""
    kind = flags.device.partition(":")[0]
    digest = hashlib.sha256(bytes(train.tolist())).hexdigest()[:16]
    own = {f"--{name.replace('_', '-')}": getattr(flags, name) for name in OF_A_RUN}
    return {"config": repr(config), "text": digest, "--device": kind, **own}


def tiny_bytes() -> llama.Config:
    """1.9 million parameters over bytes: deep and narrow reads best at this size."""
    return llama.Config(
        vocab_size=256, num_layers=6, num_heads=6, num_kv_heads=2, head_dim=32, dim=192,
        mlp_dim=352, tied=True,
    )  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    p = argparse.ArgumentParser(prog="python -m fngraph.models.train")
    p.add_argument("--device", type=device_of, default="cpu")
    p.add_argument("--steps", type=whole(), default=6000)
    p.add_argument("--batch", type=whole(), default=64, help="sequences at once")
    p.add_argument("--accumulate", type=whole(), default=1, help="batches a step")
    p.add_argument("--context", type=whole(), default=512, help="bytes a sequence")
    p.add_argument("--lr", type=real(0, 1), default=3e-3)
    p.add_argument("--weight-decay", type=real(0, 1), default=0.1)
    p.add_argument("--drop", type=real(0, 0.99), default=0.1, help="dropout on the weight matrices")
    p.add_argument("--looks", type=whole(), default=25, help="evaluations of the held-out text")
    p.add_argument("--dtype", choices=DTYPES, help="of layers; bfloat16 on a GPU, else float32")
    p.add_argument("--checkpoint", action="store_true", help="make activations again: less memory")
    p.add_argument("--compile", choices=("none", "pieces"), default="none")
    p.add_argument("--seed", type=whole(0), default=0)
    p.add_argument("--threads", type=whole(), default=torch.get_num_threads())
    p.add_argument(
        "--run", type=new_folder, default=Path("runs/bytes"), help="folder to go on from"
    )
    p.add_argument("--save-every", type=whole(), default=1, help="steps that a kill may cost")
    p.add_argument("--out", type=new_file, default=BYTES)
    return p


def card(
    config: llama.Config, run: Run, flags: argparse.Namespace, train: Tensor, held_out: Tensor,
    command: str,
) -> str:  # fmt: skip
    """The checkpoint's card, in Markdown. Its losses are those of what is stored."""
    _, params = load_checkpoint(flags.out, device=flags.device)
    as_many = cut(train, flags.context)[::HELD_OUT_EVERY]
    texts = (as_many, cut(held_out, flags.context))
    nats = [evaluate(params, x.to(flags.device), flags.batch) for x in texts]
    sequences = flags.batch * flags.accumulate
    passes = run.step * sequences * flags.context / len(train)
    count = sum(w.numel() for w in naming.named(params).values())
    facts: Mapping[str, Any] = {
        "config": config,
        "parameters": f"{count:,}, stored in bfloat16",
        "file": f"{flags.out.stat().st_size:,} bytes",
        "training text": f"{len(train):,} bytes",
        "held-out text": f"{len(held_out):,} bytes, every {HELD_OUT_EVERY}th topic or module",
        "steps": f"{run.step:,} of {sequences} x {flags.context} bytes, {passes:.1f} passes",
        "time": f"{run.seconds / 60:.1f} minutes on {device_name(flags.device)}",
        "training loss": f"{nats[0]:.3f} nats a byte",
        "held-out loss": f"{nats[1]:.3f} nats a byte",
        "seed": flags.seed,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "command": f"`{command}`",
    }
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    return f"""# {flags.out.name}

A byte-level Llama (`fngraph.models.train.tiny_bytes`) that gives the demo and the tests something
legible to write. It is no use for anything else.

Data: language topics, docstrings and comments of Python's own standard library (by the Python
authors, PSF license). Selected by `fngraph.models.training.english`, trained by
`fngraph.models.train`.

| | |
|---|---|
{rows}

![loss]({flags.out.with_suffix(".png").name})
"""


def device_name(device: str) -> str:
    """What the card calls it."""
    return (
        torch.cuda.get_device_name(device)
        if device.startswith("cuda")
        else f"{device}, {platform.machine()}"
    )


if __name__ == "__main__":
    run_command(main)
