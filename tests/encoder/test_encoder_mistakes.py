"""What is no encoder, no plan and no item is refused where it is passed, in a few words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pictures as toy
import pytest
import torch

import fngraph as fg
from fngraph.errors import FnGraphError, SizesError, SpecError, TreeError

PLAN = fg.core.plan_encoder(4, 64)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"histogram": {}}, "'default' has no run of 1 to 64 tokens"),
        ({"budgets": {}}, r"budgets=\(\) must ascend"),
        ({"budgets": 64}, "budgets=64 is an int. Pass a list of ints"),
        ({"sequences": 4}, "sequences=4 is an int. Pass a list of ints"),
        ({"histogram": 5}, "histogram=5 is an int. Pass a dict"),
        ({"histogram": {10: "a"}}, "histogram has a steps of 10 tokens"),
        ({"max_items": "2"}, "max_items='2' is a str. Pass an int or None"),
        ({"max_tokens": 4.5}, "max_tokens=4.5 is a float. Pass an int or None"),
        ({"num_budgets": "2"}, "num_budgets='2' is a str. Pass an int"),
        ({"num_budgets": 0, "histogram": [8]}, "num_budgets=0 leaves no budget. Pass 1 or more"),
        ({"eager_tokens": "5"}, "eager_tokens='5' is a str"),
        ({"log_every": "1"}, "log_every='1' is a str"),
        ({"log_every": -1}, "log_every=-1 is below 0"),
        ({"defer": "no"}, "defer='no' is a str. Pass True or False"),
        ({"ranks": 2}, "ranks=2 is an int. Pass torch.distributed.group.WORLD"),
        (
            {"model": {"paths": {"default": fg.EncoderPath(toy.see, 1000)}}},
            "min_budget=1000 is beyond the largest budget, 64 tokens",
        ),
        ({"model": {"eager_because": ""}}, "gives no reason. Say why"),
    ],
)
def test_what_is_no_option(options: Any, says: str):
    with pytest.raises(FnGraphError, match=says):
        toy.make("pictures", "cpu", "tape", **options)


@pytest.mark.parametrize(
    ("measured", "says"),
    [
        (("image", 30), r"tokens=30 is an int. Return fg.Measured\(\"image\", tokens=\{'default'"),
        (({"default": 30}, "image"), r"modality=\{'default': 30\} is a dict. Return fg.Measured"),
        (("image", {"default": 3}, 1), "sequences=1 is an int. Return fg.Measured"),
        (("image", {"default": 3.0}), r"tokens\['default'\]=3.0 is a float. Say a whole number"),
        (("image", {"default": True}), r"tokens\['default'\]=True is a bool. Say a whole number"),
        (("image", {"default": 3}, {}, "1"), "frames='1' is a str. Say a whole number"),
    ],
)
def test_what_measure_returns_of_another_kind(measured: Any, says: str):
    told = {"measure": lambda item: fg.Measured(*measured)}
    encoder = toy.make("pictures", "cpu", "tape", told)
    for run in (encoder, encoder.pack):
        with pytest.raises(SpecError, match=rf"items\[0\]: of what measure returned, {says}"):
            run([toy.picture(3)])


def test_an_encoder_is_as_it_was_made():
    paths, dims = {"default": fg.EncoderPath(toy.see, 4)}, {"C": 3}
    model = fg.EncoderModel(paths, fg.Measured, lambda path, items: items, (4, 64), dims=dims)
    paths.clear()
    dims["C"] = 5
    assert list(model.paths) == ["default"] and model.dims == {"C": 3}


def test_no_message_prints_a_tree_of_tensors():
    """Of the weights it had 57,417 characters, where they came first."""
    encoder = toy.make("pictures", "cpu", "tape")
    (step,), batch = encoder.steps.values(), toy.collate_pictures("default", [toy.picture(3)])
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: fg.graphify_encoder(toy.see_params(), toy.pictures()), "model is a dict. Pass fg"),
        (lambda: toy.make("pictures", "cpu", "tape", {"measure": lambda item: item})([batch]),
         "measure returned a Patches. Return"),
        (lambda: step.dispatch(batch), "spec is a Patches. Pass fg.BatchSpec(.*), or batch.spec"),
        (lambda: step.host_batch(batch), "spec is a Patches"),
        (lambda: fg.core.plan_sizes(toy.see_params(), k=2), "tokens|whole number"),
        (lambda: fg.core.default_sizes(toy.see_params()), "limits is a dict"),
        (lambda: fg.graphify(toy.see, limits=toy.see_params()), "limits: expected fg.Limits"),
    ]  # fmt: skip
    for call, says in calls:
        with pytest.raises((FnGraphError, TypeError), match=says) as caught:
            call()
        assert len(str(caught.value)) < 200 and "tensor(" not in str(caught.value)


def test_names_of_paths_that_there_are_none_of():
    encoder = toy.make("pictures", "cpu", "tape")
    for ran in (False, True):
        for ask in (encoder.stats.histogram, encoder.stats.hits, encoder.stats.padding):
            with pytest.raises(SpecError, match=r"path='defalt'.* Did you mean 'default'\?"):
                ask("defalt")
        assert bool(encoder.stats.histogram("default")) is ran
        both = encoder.stats + encoder.stats
        with pytest.raises(SpecError, match=r"\['default'\]"):
            both.histogram("x")
        encoder([toy.picture(3)])
    with pytest.raises(SpecError, match=r"path='x': the plan has the paths \['default'\]"):
        fg.encoder_limits(PLAN, "x")


def test_what_is_no_list_of_items_and_no_progress():
    encoder = toy.make("pictures", "cpu", "tape")
    for run in (encoder, encoder.pack):
        with pytest.raises(SpecError, match=r"items=5 is an int\. Pass a list of items"):
            run(5)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"progress=3 is an int\. Pass True, False, or"):
        encoder.capture(3)  # type: ignore[arg-type]
    with pytest.raises(SizesError, match="no token"):
        fg.core.Path(0)
    with pytest.raises(TreeError, match=r"load_slot\(3\) has nothing to load"):
        encoder.steps["default"].load_slot(3)


def test_what_prints():
    encoder = toy.make("pages", "cpu", "tape")
    assert encoder.stats.as_text() == "encoder: 0 calls, 0 items"
    text = encoder.memory.as_text()
    for path, step in encoder.steps.items():
        assert f"{path}:\n\n{step.memory.as_text()}" in text
    assert encoder.memory["global"].rows and "<table" in encoder.memory._repr_html_()
    assert repr(fg.Measured("image", {"default": 3})) == (
        "Measured(modality='image', tokens={'default': 3}, sequences={}, frames=0)"
    )


def test_a_modality_that_graphs_are_not_for_runs_eagerly_and_is_counted():
    encoder = toy.make("pictures", "cpu", "tape", {"modalities": ("video",)})
    toy.check(encoder, [toy.picture(3), toy.picture(3, 4)])
    assert encoder.stats.reasons == {"graphs are not for its modality": 1}
    torch.testing.assert_close(encoder.stats.hits(), 1)
