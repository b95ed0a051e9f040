"""The encoder transform on a toy encoder: packed runs give each item what it gets alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fngraph as fg
from fngraph.core import Item, Path, plan_encoder
from fngraph.encoder.run import encode, encoder_limits
from fngraph.errors import SpecError

WEIGHT = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


@fg.struct
class Patches:
    pixels: torch.Tensor = fg.buffer("T 8", "float32")
    spec: fg.BatchSpec = fg.host()


def forward(weight: Any, patches: Patches) -> Any:
    return torch.relu(patches.pixels @ weight)


def collate(path: str, images: Any) -> Patches:
    pixels = torch.cat([image[path] if isinstance(image, dict) else image for image in images])
    return Patches(pixels=pixels, spec=fg.BatchSpec(len(pixels), len(images)))


def step_for(plan: Any, path: str = "default") -> Any:
    budgets = [b for b in plan.path_budgets[path] if b]
    fast = fg.graphify(forward, stage="patches", modes="FULL", sizes=budgets, recorder="tape")
    limits = encoder_limits(plan, path, max_tokens=512)
    return fast.bind(WEIGHT).capture(limits, progress=False)


def images(*tokens: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, 8, generator=generator) for n in tokens]


def test_packed_runs_give_each_item_its_own_rows() -> None:
    plan = plan_encoder(8, 64)
    step = step_for(plan)
    given = images(30, 8, 100, 17, 9)  # 100 is beyond every budget
    encoded = encode(step, plan, given, [len(x) for x in given], collate)
    assert encoded.indices == (0, 1, 2, 3, 4)
    for image, output in zip(given, encoded.outputs):
        torch.testing.assert_close(output["default"], torch.relu(image @ WEIGHT))
    assert (encoded.packed.hits, encoded.packed.misses) == (4, 1)
    ran = {(padded, mode): n for (_, padded, mode), n in step.stats.counts.items()}
    planned = [run.budget or 100 for run in encoded.packed.runs]
    assert sorted(padded for padded, _ in ran) == sorted(set(planned))
    assert ran[100, fg.Mode.NONE] == 1, "and only that one ran eagerly"


def test_several_paths_one_of_which_may_have_nothing_to_run() -> None:
    plan = plan_encoder(
        8, 64, paths={"whole": Path(8), "crops": Path(16, allow_zero=True)}, max_items=4
    )
    steps = {path: step_for(plan, path) for path in plan.path_budgets}
    whole, crops = images(8, 8, 8), images(16, 0, 32)
    given = [{"whole": w, "crops": c} for w, c in zip(whole, crops)]
    counts = [{"whole": 8, "crops": len(c)} for c in crops]
    encoded = encode(steps, plan, given, counts, collate)
    assert [set(output) for output in encoded.outputs] == [
        {"whole", "crops"},
        {"whole"},
        {"whole", "crops"},
    ]
    for item, output in zip(given, encoded.outputs):
        for path, rows in output.items():
            torch.testing.assert_close(rows, torch.relu(item[path] @ WEIGHT))


def test_frames_are_a_limit_too() -> None:
    plan = plan_encoder(8, 64, max_items=4, max_frames=2, frames_per_item=2)
    given = images(8, 8)
    counts = [Item((8,), frames=2), Item((8,), frames=2)]
    encoded = encode(step_for(plan), plan, given, counts, collate)
    assert [run.items for run in encoded.packed.runs] == [(0,), (1,)]


def test_ranks_share_the_items() -> None:
    plan = plan_encoder(8, 64)
    step = step_for(plan)
    given = images(60, 8, 40, 9)
    counts = [len(x) for x in given]
    shares = [encode(step, plan, given, counts, collate, rank=r, ranks=2) for r in range(2)]
    assert sorted(i for share in shares for i in share.indices) == [0, 1, 2, 3]
    loads = [sum(counts[i] for i in share.indices) for share in shares]
    assert loads == [60, 57]
    for share in shares:
        for i, output in zip(share.indices, share.outputs):
            torch.testing.assert_close(output["default"], torch.relu(given[i] @ WEIGHT))


def test_what_does_not_fit_together_is_refused() -> None:
    plan = plan_encoder(8, 64)
    with pytest.raises(SpecError, match="2 items, but token counts of 1"):
        encode(lambda batch: batch, plan, images(8, 8), [8], collate)
    with pytest.raises(SpecError, match=r"steps for the paths \['crops'\]"):
        encode({"crops": lambda batch: batch}, plan, images(8), [8], collate)
