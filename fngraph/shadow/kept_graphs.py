"""The graphs of a key themselves, replayed on what was saved: in the step's own memory, which holds
again what it held once that is read."""

from __future__ import annotations

import torch

from fngraph.core import Mode
from fngraph.graphs.memory import preserved
from fngraph.graphs.replay import launch
from fngraph.shadow.parts import Parts, copied, parts_of
from fngraph.shadow.saved import Ran, Saved, donated_of, drawn_from
from fngraph.step.capture import plan_step
from fngraph.step.keys import Keys
from fngraph.step.prepared import Prepared


@torch.no_grad()
def replayed(keys: Keys, saved: Saved, prepared: Prepared) -> Ran:
    """What the key's own graphs give. Outputs that are borrowed expire.

    Raises:
        CaptureError: no memory for a copy of the donated leaves; nothing has been written.
    """
    replay, shared, ring = prepared.replay, keys.shared, keys.ring
    assert replay is not None
    parts, leaves = parts_of(keys.executable), donated_of(keys)
    shared.binding.check()
    shared.recorder.loans.expire(keys.outputs, "bisect()")
    with keys.fixed_ambient(), preserved(list(leaves.values())), drawn_from(keys, saved):
        _put(parts, saved, leaves)
        if keys.executable.planners:
            plan_step(keys, prepared.chosen, prepared.true, [x.cpu() for x in saved.leaves])
        try:
            ring.put(prepared.words, saved.leaves)
            bounds = None if prepared.chosen.mode is Mode.FULL else saved.counts.bounds
            launch(replay.bind(prepared.true), bounds)
        except BaseException:
            ring.resume()
            raise
        outputs = tuple(view.clone() for view in prepared.views)
        state = copied(parts, saved.rows, leaves)
        shared.recorder.synchronize()
    return Ran(outputs, state)


def _put(parts: Parts, saved: Saved, leaves: dict[int, torch.Tensor]) -> None:
    for i in parts.whole:
        leaves[i].copy_(saved.state[i])
    for group, numbers in zip(parts.groups, saved.rows.numbers):
        for i in group.caches:
            leaves[i].index_copy_(0, numbers, saved.state[i])
