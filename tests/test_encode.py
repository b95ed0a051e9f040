"""The encoder transform on a toy encoder: packed runs give each item what it gets alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fngraph as fg
from fngraph.core import Item, Path, Run, plan_encoder
from fngraph.encoder.run import EAGER_TOKENS, encode, encoder_limits, execute
from fngraph.errors import ModesError, SizesError, SpecError, TreeError

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


def step_for(plan: Any, path: str = "default", **options: Any) -> Any:
    budgets = [b for b in plan.path_budgets[path] if b]
    chosen = {"modes": "FULL", "sizes": budgets, "recorder": "tape"} | options
    fast = fg.graphify(forward, stage="patches", **chosen)
    return fast.bind(WEIGHT).capture(encoder_limits(plan, path), progress=False)


def ran_as(step: Any) -> dict[tuple[int, str], int]:
    """Steps by padded size and mode."""
    return {(padded, str(mode)): n for (_, padded, mode), n in step.stats.counts.items()}


def images(*tokens: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, 8, generator=generator) for n in tokens]


def test_packed_runs_give_each_item_its_own_rows() -> None:
    plan = plan_encoder(8, 64)
    step = step_for(plan)
    given = images(30, 8, 100, 17, 9)  # 100 is beyond every budget
    encoded = encode(step, plan, given, [len(x) for x in given], collate)
    assert step.limits.max_tokens == EAGER_TOKENS, "none were asked for"
    assert encoded.indices == (0, 1, 2, 3, 4)
    for image, output in zip(given, encoded.outputs):
        torch.testing.assert_close(output["default"], torch.relu(image @ WEIGHT))
    assert (encoded.packed.hits, encoded.packed.misses) == (4, 1)
    planned = [run.budget or 100 for run in encoded.packed.runs]
    assert sorted(padded for padded, _ in ran_as(step)) == sorted(set(planned))
    assert ran_as(step)[100, "NONE"] == 1, "and only that one ran eagerly"
    assert {(ran.budget, ran.why) for ran in encoded.ran if not ran.budget} == {
        (None, "more tokens than the largest budget of default, 64")
    }
    storages = {output["default"].untyped_storage().data_ptr() for output in encoded.outputs}
    assert len(storages) == len(given), "no item keeps its neighbours' memory"


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


def test_what_was_planned_is_what_runs() -> None:
    """A step would have taken the least key that covers the batch, and the plan knows better."""
    plan = plan_encoder(8, 64, max_items=4, max_frames=2)
    step = step_for(plan)
    counts = [Item((8,), frames=9)]
    encoded = encode(step, plan, images(8), counts, collate)
    assert ran_as(step) == {(8, "NONE"): 1} and encoded.packed.misses == 1
    assert step.stats.reasons == {"more than 2 frames": 1}
    wide = plan._replace(path_budgets={"default": (16, 32, 64)})
    step = step_for(plan)
    for budget in (16, None, 64):
        runs = [Run("default", (0,), budget)]
        execute({"default": step}, wide, runs, images(8), [Item((8,), 0, (1,))], collate)
    assert ran_as(step) == {(16, "FULL"): 1, (8, "NONE"): 1, (64, "FULL"): 1}


def test_a_step_of_another_plan_or_that_lends_its_results_is_refused() -> None:
    plan = plan_encoder(8, 64)
    for options, error, says in (
        (
            {"sizes": (16,)},
            SizesError,
            r"keys of \[16\] tokens, the plan budgets of \[8, 16, 3",
        ),
        ({"sizes": (8, 16, 32, 64, 128)}, SizesError, r"fg.graphify\(..., sizes=\(8, 16, 32, 64\)"),
        ({"modes": "NONE"}, SizesError, r"keys of \[\] tokens"),
        ({"outputs": "borrow"}, TreeError, 'lends its results .*Capture it with outputs="own"'),
    ):
        step = step_for(plan, **options)
        with pytest.raises(error, match=says):
            encode(step, plan, images(8, 8), [8, 8], collate)
        assert not step.stats.steps
    with pytest.raises(TreeError, match="is a function, which takes no plan"):
        encode(forward, plan, images(8), [8], collate)


def test_a_key_of_too_few_sequences_is_refused() -> None:
    plan = plan_encoder(8, 64)
    step = step_for(plan, key_reqs=1)
    with pytest.raises(ModesError, match=r"budget of 16 tokens, .*Descriptor\(16, 1\).*key_reqs"):
        encode(step, plan, images(8, 8), [8, 8], collate)
    encode(step, plan, images(8), [8], collate)


def test_a_key_that_cannot_be_captured_runs_eagerly_where_that_is_no_error() -> None:
    plan = plan_encoder(8, 64)
    step = step_for(plan, on_failure="eager", memory_budget=1)
    encoded = encode(step, plan, images(8), [8], collate)
    assert encoded.packed.hits == 1 and encoded.ran[0].budget is None
    assert encoded.ran[0].why.startswith("capture failed: memory_budget=1 bytes")


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
    step = step_for(plan)

    def bare(path: str, images: Any) -> Any:
        return torch.cat(images)

    for error, says, given in (
        (SpecError, "2 items, but token counts of 1", (step, images(8, 8), [8], collate)),
        (SpecError, r"steps for the paths \['crops'\]", ({"crops": step}, images(8), [8], collate)),
        (SpecError, "8 tokens in 1 sequences; .* bring 9 in 1", (step, images(8), [9], collate)),
        (
            SpecError, "8 tokens in 1 sequences; .* bring 8 in 2",
            (step, images(8), [Item((8,), 0, (2,))], collate),
        ),
        (TreeError, "a Tensor without a spec", (step, images(8), [8], bare)),
    ):  # fmt: skip
        steps, items, counts, make = given
        with pytest.raises(error, match=says):
            encode(steps, plan, items, counts, make)
    with pytest.raises(SpecError, match=r"rank=2 is none of ranks=2. Pass 0 to 1"):
        encode(step, plan, images(8), [8], collate, rank=2, ranks=2)

    def fewer(weight: Any, patches: Patches) -> Any:
        return {"rows": patches.pixels @ weight, "sum": weight.sum()}

    fast = fg.graphify(fewer, stage="patches", modes="FULL", sizes=plan.budgets, recorder="tape")
    odd = fast.bind(WEIGHT).capture(encoder_limits(plan), progress=False)
    with pytest.raises(TreeError, match=r"output\['sum'\] of .* has the shape \[\]"):
        encode(odd, plan, images(8), [8], collate)
