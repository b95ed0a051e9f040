"""A run on disk: everything that the next step reads, in one file that is always whole.

It is written beside the old one, reaches the disk, and takes its name in one move: whenever a
process is killed, there is the state after some step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fngraph.models.training.adamw import Moments
from fngraph.models.training.flat import Flat
from fngraph.models.weights import naming
from fngraph.models.weights.checkpoint import write_whole
from fngraph.models.weights.loading import CheckpointError


class Run(NamedTuple):
    """A run between two steps. Where in the text it is, and what its next step draws, follow from
    its step and the seed.

    Attributes:
        losses: of each step, (steps,) float32.
        looks: (looks, 2) float32: the step, and the loss of held-out text after it.
        seconds: that it has taken so far, in all processes.
    """

    params: Flat
    opt: Moments
    losses: Tensor
    looks: Tensor
    seconds: float = 0.0

    @property
    def step(self) -> int:
        """Steps taken; waits for the device."""
        return len(self.losses)

    @property
    def best(self) -> float:
        """The least loss of held-out text so far."""
        return min(self.looks[:, 1].tolist(), default=float("inf"))


def save_run(path: Path, run: Run, facts: Mapping[str, Any]) -> None:
    """Write a run, with the facts that whoever goes on must agree with."""
    tensors = {n: x.detach().cpu().contiguous() for n, x in naming.named(run).items()}
    said = {"facts": json.dumps(facts), "seconds": repr(run.seconds)}
    write_whole(path, save(tensors, said))


def load_run(path: Path, blank: Run, facts: Mapping[str, Any]) -> Run:
    """The run of a file.

    Args:
        blank: a run of the same model before its first step; tensors go to its devices.
        facts: as `save_run` was told.

    Raises:
        CheckpointError: it is no such file, or of a run with other facts or other tensors; all are
            listed.
    """
    try:
        with safe_open(path, framework="pt") as file:
            said = file.metadata() or {}
            found = {name: file.get_tensor(name) for name in file.keys()}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} is no safetensors file: {error}") from None
    if "facts" not in said:
        raise CheckpointError(f"{path} was not written by a run of training")
    before = json.loads(said["facts"])
    now = json.loads(json.dumps(facts))
    other = [
        f"{name} {before.get(name)} there, {now.get(name)} now"
        for name in dict.fromkeys([*before, *now])
        if before.get(name) != now.get(name)
    ]
    if other:
        raise CheckpointError(
            f"{path} is of another run: {'; '.join(other)}. Pass what it was begun with, or "
            "another folder"
        )
    own = naming.named(blank)
    wrong = _unlike(own, found)
    if wrong:
        raise CheckpointError(f"{path} is of another model: {'; '.join(wrong)}")
    run: Run = naming.filled(blank, {n: found[n].to(own[n].device) for n in own})
    return run._replace(seconds=float(said["seconds"]))


def _unlike(own: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> list[str]:
    """In which tensors a file differs from what goes on; how many losses there are may."""
    grown, told = ("losses", "looks"), []
    for name in dict.fromkeys([*own, *found]):
        here, there = (
            f"{x[name].dtype} {tuple(x[name].shape)}" if name in x else "none" for x in (own, found)
        )
        if here != there and not (name in grown and name in found):
            told.append(f"{name}: {there} there, {here} now")
    return told


def blank_run(params: Flat, opt: Moments) -> Run:
    """A run before its first step."""
    return Run(params, opt, torch.zeros(0), torch.zeros(0, 2))
