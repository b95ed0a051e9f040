"""`step.rebind`: the next call computes with the new weights, on every key and in every mode."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import UserDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import toys
from torch import Tensor

import fngraph as fg
from fngraph.core import trees
from fngraph.errors import AddressError, CaptureError, TreeError
from fngraph.step import capture
from fngraph.step.keys import make_keys

BATCHES = [toys.batch(3, 2, seed=1), toys.decode(2, seed=2), toys.batch(5, 4, seed=3)]


def make(fn: Any, params: Any, cache: Any, device: Any, **options: Any) -> Any:
    """A captured step over the toys' limits."""
    fast = fg.graphify(fn, donate=1, stage="batch", sizes=toys.SIZES, **options)
    recorder = "tape" if device.type == "cpu" else "cuda"
    return fast.bind(params).capture(cache, toys.LIMITS, progress=False, recorder=recorder)


def over_attend(device: Any, **options: Any) -> tuple[Any, Any, Any]:
    """A step over `toys.attend`, its weights and its cache."""
    params, cache = toys.attention_params(device=device), toys.attention_cache(device=device)
    return make(toys.attend, params, cache, device, **options), params, cache


def check(step: Any, fn: Any, params: Any, cache: Any, device: Any) -> None:
    """Several keys against bare forward with `params`."""
    for batch in BATCHES:
        batch = toys.on(batch, device)
        want, after = toys.bare(fn, params, cache, batch)
        got, _ = step(cache, batch)
        toys.assert_trees((got, cache), (want, after), **toys.CLOSE)


def pointers(tree: Any) -> list[int]:
    """Addresses of the leaves."""
    return [x.data_ptr() for x in toys.leaves(tree)]


# --- the same shapes ------------------------------------------------------------------------------


@pytest.mark.sampled(3)
@pytest.mark.parametrize("where", ["cpu", "device"])
@pytest.mark.parametrize("modes", ["NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE"])
def test_the_next_call_computes_with_the_new_weights(device, modes: str, where: str):
    step, params, cache = over_attend(device, modes=modes)
    check(step, toys.attend, params, cache, device)
    addresses, replays = pointers(params), dict(step.replays)
    new = toys.attention_params(seed=7, device=device if where == "device" else "cpu")
    assert step.rebind(params=new) is None
    assert pointers(params) == addresses and step.replays == replays
    toys.assert_trees(params, toys.moved(new, device))
    check(step, toys.attend, toys.moved(new, device), cache, device)


class Files(UserDict[str, Tensor]):
    """Leaves that are made when they are asked for."""

    asked = 0

    def __getitem__(self, path: str) -> Tensor:
        self.asked += 1
        return super().__getitem__(path).clone()


def test_leaves_by_path_are_loaded_one_by_one(device):
    step, _, cache = over_attend(device)
    new = toys.attention_params(seed=7)
    flat, treedef = trees.flatten(new)
    files = Files(zip(trees.paths(treedef, "params"), flat))
    step.rebind(params=files)
    assert files.asked == 2 * len(files)
    check(step, toys.attend, toys.moved(new, device), cache, device)
    head = torch.ones_like(new["head"])
    step.rebind(params={"params['head']": head})
    check(step, toys.attend, toys.moved({**new, "head": head}, device), cache, device)


def test_parameters_and_inference_tensors_are_rebound_in_any_mode(device):
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with torch.inference_mode(mode is torch.no_grad):
            params = toys.tally_params(device)
        if mode is not torch.no_grad:
            params["w"].requires_grad_()
        state = toys.tally_state(device)
        step = make(toys.tally, params, state, device)
        with mode():
            for shape in (8, 5):
                new = {"w": torch.full((toys.V, shape), 2.0)}
                new["w"].requires_grad_(not torch.is_inference_mode_enabled())
                if shape == 8:
                    step.rebind(params=new)
        check(step, toys.tally, {"w": torch.full((toys.V, 8), 2.0, device=device)}, state, device)


@pytest.mark.parametrize("inference", [False, True])
def test_a_leaf_stays_what_it_is_whatever_takes_its_place(inference: bool, device):
    """A value of another shape that was made under inference mode, or was not."""
    with torch.inference_mode(inference):
        params = toys.tally_params(device)
    step = make(toys.tally, params, toys.tally_state(device), device)
    with torch.inference_mode(not inference):
        step.rebind(params={"w": torch.ones(toys.V + 1, toys.E, device=device)})
    assert len(params["w"]) == toys.V + 1 and params["w"].is_inference() is inference


def test_leaves_may_change_places_with_one_another(device):
    step, params, cache = over_attend(device)
    first, second = params["layers"]
    want = toys.clone({**params, "layers": [second, first]})
    step.rebind(params={**params, "layers": [second, first]})
    toys.assert_trees(params, want)
    check(step, toys.attend, want, cache, device)


# --- nothing is written if one is wrong -----------------------------------------------------------

BAD: dict[str, tuple[Any, type[Exception], list[str]]] = {
    "another structure": (lambda p: {**p, "bias": p["head"]}, TreeError, ["params['bias']"]),
    "a leaf missing": (lambda p: {"embed": p["embed"], "layers": p["layers"]}, TreeError,
                       ["params['head']"]),
    "a number": (lambda p: {**p, "head": 3}, TreeError, ["params['head']", "int"]),
    "an unknown path": (lambda p: {"params['head']": p["head"], "params['x']": p["head"]},
                        TreeError, ["params['x']", "params['embed']"]),
    "no tensor by path": (lambda p: {"params['embed']": p["embed"], "params['head']": 3},
                          TreeError, ["params['head']", "int"]),
    "a sparse one": (lambda p: {**p, "head": p["head"].to_sparse()}, TreeError,
                     ["params['head']", "dense"]),
    "no memory": (lambda p: {**p, "head": p["head"].to("meta")}, TreeError,
                  ["params['head']", "meta"]),
    "a shape that forward cannot take": (
        lambda p: {**p, "head": torch.ones(toys.E + 1, toys.V)}, Exception, ["reduction dim"]),
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("what", BAD)
def test_nothing_is_written_if_one_is_wrong(device, what: str):
    (step, params, cache), (change, kind, words) = over_attend(device), BAD[what]
    before = toys.clone(params)
    with pytest.raises(kind) as error:
        step.rebind(params=change(toys.moved(toys.attention_params(seed=7), device)))
    assert [word for word in words if word not in str(error.value)] == []
    toys.assert_trees(params, before)
    check(step, toys.attend, before, cache, device)


@pytest.mark.parametrize("name", ["cache", "weights", "batch"])
def test_only_held_arguments_can_be_rebound(name: str):
    step, params, _ = over_attend(torch.device("cpu"))
    with pytest.raises(TreeError, match=f"'{name}' is not held.*params"):
        step.rebind(**{name: params})


def tied(params: Any, state: Any, batch: toys.Batch) -> tuple[Tensor, Any]:
    """Logits by the embedding's own table."""
    x_TE = params["embed"][batch.token_ids]
    return x_TE @ params["head"].t(), state


def test_tied_leaves_stay_tied(device):
    table = torch.rand(toys.V, toys.E, device=device)
    params, state = {"embed": table, "head": table.view(toys.V, toys.E)}, {}
    step = make(tied, params, state, device)
    new = torch.rand(toys.V, toys.E)
    for given in ({"embed": new, "head": new}, {"embed": new, "head": new.clone()}):
        step.rebind(params=given)
        check(step, tied, toys.moved(given, device), state, device)
    before = table.clone()
    for wrong in ({"embed": new + 1, "head": new + 2}, {"params['head']": new.double()}):
        with pytest.raises(TreeError, match=r"embed.*head.*one memory"):
            step.rebind(params=wrong)
    assert torch.equal(table, before)
    step.rebind(params={"params['head']": new + 3})  # one memory: it is both
    check(step, tied, toys.moved({"embed": new + 3, "head": new + 3}, device), state, device)


def test_views_of_one_storage_that_share_nothing_are_not_tied(device):
    both = torch.rand(2 * toys.V, toys.E, device=device)
    columns = torch.rand(toys.V, 2 * toys.E, device=device)
    pairs = [(both[: toys.V], both[toys.V :]), (columns[:, ::2], columns[:, 1::2])]
    for embed, head in pairs:
        step = make(tied, {"embed": embed, "head": head}, {}, device)
        new = {"embed": torch.rand(toys.V, toys.E), "head": torch.rand(toys.V, toys.E)}
        step.rebind(params=new)
        check(step, tied, toys.moved(new, device), {}, device)
    over = {"embed": both[: toys.V], "head": both[1 : toys.V + 1]}
    step = make(tied, over, {}, device)
    with pytest.raises(TreeError, match="one memory"):
        step.rebind(params=new)


def test_two_storages_over_one_memory_are_tied_too():
    """As those of arrays that overlap; on the CPU alone, where numpy is."""
    array = np.zeros((toys.V + 1, toys.E), np.float32)
    params = {"embed": torch.from_numpy(array[:-1]), "head": torch.from_numpy(array[1:])}
    step = make(tied, params, {}, torch.device("cpu"))
    new = {name: torch.rand(toys.V, toys.E) for name in params}
    with pytest.raises(TreeError, match="one memory"):
        step.rebind(params=new)
    assert not array.any()
    both = np.random.default_rng(0).random((2 * toys.V, toys.E), np.float32)
    params = {"embed": torch.from_numpy(both[: toys.V]), "head": torch.from_numpy(both[toys.V :])}
    step = make(tied, params, {}, torch.device("cpu"))
    swapped = {"embed": torch.from_numpy(both[toys.V :]), "head": torch.from_numpy(both[: toys.V])}
    want = {name: x.clone() for name, x in swapped.items()}
    step.rebind(params=swapped)  # writing the one changes the other's new value
    check(step, tied, want, {}, torch.device("cpu"))


# --- other shapes and dtypes ----------------------------------------------------------------------


def headed(params: Any, state: Any, batch: toys.Batch) -> tuple[Tensor, Any]:
    """Logits of a head of any width; one leaf is not read."""
    x_TE = params["embed"][batch.token_ids].to(params["head"].dtype)
    real_T = (batch.slot_mapping >= 0).long()
    return x_TE @ params["head"], {"seen": state["seen"].index_add(0, batch.token_ids, real_T)}


def headed_params(width: int = 3, **to: Any) -> dict[str, Tensor]:
    """Weights of `headed`."""
    made = {"embed": torch.rand(toys.V, toys.E), "head": torch.rand(toys.E, width),
            "unread": torch.zeros(2)}  # fmt: skip
    return {name: x.to(**to) for name, x in made.items()}


def headed_state(device: Any) -> dict[str, Tensor]:
    """State of `headed`."""
    return {"seen": torch.zeros(toys.V, dtype=torch.int64, device=device)}


def over_headed(device: Any, **options: Any) -> tuple[Any, Any, Any]:
    """A step over `headed`, its weights and its state."""
    params, state = headed_params(device=device), headed_state(device)
    return make(headed, params, state, device, **options), params, state


def filled(step: Any, like: toys.Batch) -> Any:
    """A batch in the ring, with the values of `like`."""
    batch = step.host_batch(like.spec)
    for name in fg.core.buffers_of(toys.Batch):
        getattr(batch, name).copy_(getattr(like, name))
    return batch


def test_a_batch_in_the_ring_is_good_for_one_step_across_a_capture_or_another_state(device):
    """What was handed out before is read right; one that has been used is refused."""
    step, params, state = over_headed(device, modes="FULL")
    check(step, headed, params, state, device)
    under = lambda: torch.autocast(device.type, torch.bfloat16)  # noqa: E731
    used = []
    for i, like in enumerate([*BATCHES, BATCHES[0], BATCHES[1]]):
        batch = filled(step, like)
        if i % 2:
            params = headed_params(4 + i, device=device)
            step.rebind(params=params)  # of another shape: all is captured again
        with under() if i % 3 == 2 else contextlib.nullcontext():
            want, after = toys.bare(headed, params, state, toys.on(like, device))
            got, _ = step(state, batch)
            toys.assert_trees((got, state), (want, after), atol=1e-2, rtol=1e-2)
            used.append(batch)
            for old in used:
                with pytest.raises(TreeError, match="earlier host_batch"):
                    step(state, old)
            toys.assert_trees(state, after)


def test_a_ring_of_another_size_knows_the_older_ones_batches(device):
    step, *_ = over_headed(device, modes="FULL")
    old, main = filled(step, BATCHES[0]), step.main
    plan = main.executable.plan
    other = dataclasses.replace(plan, sizes={**plan.sizes, "T": plan.sizes["T"] + 1})
    executable = dataclasses.replace(main.executable, plan=other)
    ring = make_keys(executable, step.shared, main).ring
    assert ring is not main.ring and make_keys(main.executable, step.shared, main).ring is main.ring
    with pytest.raises(TreeError, match="earlier host_batch"):
        ring.check_own([old.token_ids], -1)


@pytest.mark.parametrize("modes", ["NONE", "FULL", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_another_shape_or_dtype_is_captured_again(device, modes: str, dtype: torch.dtype):
    step, params, state = over_headed(device, modes=modes)
    check(step, headed, params, state, device)
    keys, old = list(step.replays), list(step.replays.values())
    new = headed_params(3 if dtype is torch.float64 else 5)
    new["head"] = new["head"].to(dtype)
    step.rebind(params=new)
    assert list(step.replays) == keys and not any(r in old for r in step.replays.values())
    toys.assert_trees(params, toys.moved(new, device))  # the tree that was bound holds the new ones
    check(step, headed, params, state, device)
    params["head"].data = params["head"].clone()
    with pytest.raises(AddressError, match="head"):
        step(state, toys.on(BATCHES[0], device))


def test_a_leaf_that_nothing_reads_costs_no_capture(device):
    step, params, state = over_headed(device)
    before = dict(step.replays)
    step.rebind(params={"params['unread']": torch.ones(5, dtype=torch.int64)})
    assert step.replays == before
    assert params["unread"].tolist() == [1] * 5
    check(step, headed, params, state, device)
    with torch.autocast(device.type, dtype=torch.bfloat16):  # another trace, over the new leaf
        got, _ = step(state, toys.on(BATCHES[0], device))
    assert got.dtype is torch.bfloat16 or device.type == "cuda"


LENT: dict[str, tuple[str, Callable[[Any, Any], Tensor]]] = {
    "rows of another leaf": ("head", lambda p, s: p["embed"][: toys.E]),
    "another leaf, reshaped": ("unread", lambda p, s: p["embed"].view(-1)),
    "another leaf's bits": ("unread", lambda p, s: p["embed"].view(torch.int32)),
    "a part of itself": ("head", lambda p, s: p["head"].view(-1)[toys.E :].view(toys.E, 2)),
    "donated state": ("unread", lambda p, s: s["seen"]),
}  # fmt: skip


@pytest.mark.parametrize("what", LENT)
@pytest.mark.parametrize("both", [False, True])
def test_a_value_in_memory_of_a_bound_leaf_gets_memory_of_its_own(device, what: str, both: bool):
    """Or writing the one would be writing the other; in the same call too."""
    step, params, state = over_headed(device)
    name, value = LENT[what]
    given, embed = value(params, state), torch.rand(toys.V, toys.E)
    want = toys.clone({**params, name: given})
    new = {f"params['{name}']": given}
    if both:
        want["embed"] = embed.to(device)
        new = {"params['embed']": embed, **new}
    step.rebind(params=new)
    check(step, headed, want, state, device)
    step.rebind(params={"params['embed']": 2 * embed})
    toys.assert_trees(params, {**want, "embed": (2 * embed).to(device)})
    check(step, headed, {**want, "embed": (2 * embed).to(device)}, state, device)
    owners = [x.untyped_storage().data_ptr() for x in toys.leaves((params, state))]
    assert len(set(owners)) == len(owners)


def test_every_function_over_the_leaves_notices(device):
    params, state, other = headed_params(device=device), headed_state(device), headed_state(device)
    step, twin = make(headed, params, state, device), make(headed, params, other, device)
    new = headed_params(5, device=device)
    step.rebind(params=new)
    for _ in range(2):
        with pytest.raises(AddressError, match=r"params\['head'\]"):
            twin(other, toys.on(BATCHES[0], device))
    with pytest.raises(AddressError, match=r"params\['head'\].*rebind"):
        twin.rebind(params={"params['embed']": params["embed"]})
    twin.rebind(params=params)
    check(twin, headed, params, other, device)
    check(step, headed, params, state, device)


def test_the_last_shape_that_fits_is_taken_after_one_that_does_not(device):
    step, _, state = over_headed(device)
    for width in (5, 3, 5):
        new = headed_params(width)
        step.rebind(params=new)
        check(step, headed, toys.moved(new, device), state, device)


@dataclasses.dataclass
class Weights:
    """A tree of dataclasses."""

    embed: Tensor
    head: Tensor
    unread: Tensor


def test_parameters_of_a_dataclass_are_replaced_where_they_are(device):
    made = {name: torch.nn.Parameter(x) for name, x in headed_params(device=device).items()}
    params, state = Weights(**made), headed_state(device)

    def by_name(params: Any, state: Any, batch: toys.Batch) -> Any:
        return headed(vars(params), state, batch)

    step = make(by_name, params, state, device)
    step.rebind(params=Weights(**headed_params(5)))
    assert params.head is made["head"] and params.head.shape == (toys.E, 5)
    check(step, by_name, params, state, device)
    step.rebind(params={"params.head": torch.ones(toys.E, 2, dtype=torch.bfloat16)})
    check(step, by_name, params, state, device)


def test_ambient_states_go_on_with_the_new_weights(device):
    (step, params, state), batch = over_headed(device), toys.on(BATCHES[0], device)
    for width in (3, 5):
        new = headed_params(width)
        step.rebind(params=new)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            want, _ = toys.bare(headed, params, state, batch)
            got, _ = step(state, batch)
        torch.testing.assert_close(got, want)
        check(step, headed, params, state, device)


def test_a_key_that_cannot_be_captured_again_is_captured_when_needed(device, monkeypatch):
    step, _, state = over_headed(device, modes="FULL")
    done: list[Any] = []
    original = capture.capture_key

    def second_fails(*args: Any) -> Any:
        done.append(args)
        if len(done) == 2:
            raise CaptureError("no room")
        return original(*args)

    new = headed_params(5)
    with monkeypatch.context() as patch:
        patch.setattr(capture, "capture_key", second_fails)
        with pytest.raises(CaptureError, match="no room"):
            step.rebind(params=new)
    assert len(step) == 1
    check(step, headed, toys.moved(new, device), state, device)
    assert len(step) > 1
