"""The captured step of training against the plain loop of torch: weights, memory, donation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fngraph as fg
from fngraph.models import llama, naming
from fngraph.models.training import adamw
from fngraph.models.training.flat import Flat, packed, unpacked
from fngraph.models.training.step import gradients, make_train_step
from fngraph.models.training.texts import dropped, make_loss, nats_a_token
from tests.models.conftest import DEVICES

SETTINGS = adamw.AdamW(betas=(0.9, 0.99), weight_decay=0.1, clip=1.0, decays=Flat(True, False))
SMALL = llama.Config(
    vocab_size=256, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, dim=16, mlp_dim=24,
    tied=True,
)  # fmt: skip
STEPS = 50
SCHEDULE = adamw.cosine(3e-3, STEPS, warmup=0.1)


def tokens(steps: int, *shape: int, device: Any = "cpu") -> Tensor:
    """For each step, of a text whose next byte can be learned."""
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(200, (steps, *shape[:-1], 1), generator=generator)
    return ((starts + 3 * torch.arange(shape[-1])) % 256).to(device)


def plain_loop(
    config: llama.Config, batches: Tensor, clip: float | None = 1.0
) -> dict[str, Tensor]:
    """As the tutorials of torch have it."""
    named = naming.named(llama.init_params(config, device=batches.device))
    for w in named.values():
        w.requires_grad_()
    params = naming.filled(llama.blank(config), named)
    groups = [
        {"params": [w for w in named.values() if w.ndim == 2], "weight_decay": 0.1},
        {"params": [w for w in named.values() if w.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.99))
    with torch.enable_grad():
        for i, batch in enumerate(batches):
            for group in optimizer.param_groups:
                group["lr"] = SCHEDULE(torch.tensor(i)).item()
            nats_a_token(params, batch).backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(named.values(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return {n: w.detach() for n, w in named.items()}


def trained(
    config: llama.Config, batches: Tensor, recorder: str | None, loss: Any = None, *,
    average: bool = False, settings: adamw.AdamW = SETTINGS, **options: Any,
) -> tuple[Any, Flat, adamw.Moments, list[dict[str, Tensor]]]:  # fmt: skip
    """What was captured, weights, moments, and the metrics of each step. None: bare, uncaptured."""
    params = packed(naming.named(llama.init_params(config, device=batches.device)))
    opt = adamw.init(params, average=average)
    step = make_train_step(loss or make_loss(config), settings, SCHEDULE, **options)
    fast: Any = step
    if recorder is not None:
        fast = fg.graphify(
            step, donate=("params", "opt"), stage="batch", modes="FULL", recorder=recorder
        )
    metrics = []
    for batch in batches:
        params, opt, found = fast(params, opt, batch)
        metrics.append(found)
    return fast, params, opt, metrics


@pytest.mark.parametrize("device, recorder", DEVICES)
def test_fifty_steps_are_those_of_the_plain_loop(config, device: str, recorder: str):
    batches = tokens(STEPS, 4, 17, device=device)
    want = plain_loop(config, batches)
    fast, params, _, metrics = trained(config, batches, recorder)
    got = naming.named(unpacked(llama.blank(config), params))
    for name in want:
        assert (got[name] - want[name]).abs().max() < 1e-6, name
    losses = [m["loss"].item() for m in metrics]
    assert losses[-1] < 0.8 * losses[0]
    (step,) = fast.steps
    assert {str(mode): n for (_, _, mode), n in step.stats.counts.items()} == {"FULL": STEPS}


def test_each_leaf_is_updated_where_it_is():
    fast, params, opt, _ = trained(SMALL, tokens(2, 4, 17), "tape", average=True)
    donated = fast.trace(params, opt, batch=tokens(1, 4, 17)[0]).donation.rows
    assert [row.path for row in donated][:3] == ["params.matrices", "params.vectors", "opt.step"]
    assert len(donated) == 9 and {row.how for row in donated} == {"in place"}
    before = params.matrices.data_ptr()
    params, *_ = fast(params, opt, tokens(1, 4, 17)[0])
    assert params.matrices.data_ptr() == before


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("device", "recorder"), DEVICES)
def test_frozen_weights_stay_and_cost_no_gradient(device: str, recorder: str, accumulate: int):
    """The last layer of two is trained, over one that is held in bfloat16: as torch's own AdamW
    does over parameters some of which want no gradient."""
    torch.manual_seed(0)
    below = {
        "w": torch.randn(6, 6, device=device).bfloat16(),
        "ids": torch.arange(6, device=device),
    }
    kept = below["w"].clone()
    params = {"w": torch.randn(6, 3, device=device)}
    batches = torch.randn(5, accumulate, 4, 6, device=device)

    def loss(params: Any, batch: Any, frozen: Any) -> Tensor:
        return (
            (torch.tanh(batch @ frozen["w"].float())[:, frozen["ids"]] @ params["w"])
            .square()
            .mean()
        )

    mine = params["w"].clone().requires_grad_()
    optimizer = torch.optim.AdamW([mine], lr=0.1, weight_decay=0.0)
    for batch in batches:
        with torch.enable_grad():
            loss({"w": mine}, batch.view(-1, 6), below).backward()
        optimizer.step()
        optimizer.zero_grad()
    step = make_train_step(
        loss, adamw.AdamW((0.9, 0.999), weight_decay=0.0, clip=None), adamw.constant(0.1),
        frozen=True, accumulate=accumulate,
    )  # fmt: skip
    fast = fg.graphify(
        step, donate=("params", "opt"), stage="batch", modes="FULL", recorder=recorder
    )
    opt = adamw.init(params)
    assert [x.shape for x in fg.core.trees.flatten(opt.first)[0]] == [(6, 3)]
    for batch in batches:
        params, opt, _ = fast(params, opt, batch if accumulate > 1 else batch[0], below)
    torch.testing.assert_close(params["w"], mine.detach(), rtol=1e-5, atol=1e-5)
    assert below["w"].equal(kept)
    traced = fast.trace(params, opt, below, batch=batch if accumulate > 1 else batch[0])
    held = [leaf.path for leaf in traced.args.leaves if leaf.role.value == "held"]
    assert sorted(held) == ["frozen['ids']", "frozen['w']"]
    with pytest.raises(TypeError, match="frozen"):
        step(params, opt, batches[0])


def test_batches_that_are_accumulated_are_one_large_batch_in_less_memory():
    batches = tokens(3, 8, 33)
    whole, want, _, of_one = trained(SMALL, batches, "tape")
    parts = batches.unflatten(1, (4, 2))
    fast, got, _, of_four = trained(SMALL, parts, "tape", accumulate=4)
    torch.testing.assert_close(got.matrices, want.matrices, atol=2e-6, rtol=0)
    torch.testing.assert_close(of_four[-1]["loss"], of_one[-1]["loss"], atol=1e-6, rtol=0)
    _, bare, _, _ = trained(SMALL, parts, None, accumulate=4)
    assert torch.equal(got.matrices, bare.matrices)
    donated = fast.trace(got, adamw.init(got), batch=parts[0]).donation.rows
    assert {row.how for row in donated} == {"in place"}
    pools = [step.steps[0].memory.rows[0].estimated.pool for step in (fast, whole)]
    assert pools[0] < 0.4 * pools[1]


@pytest.mark.parametrize("most, norm", [(None, 13.0), (20.0, 13.0), (2.6, 2.6)])
def test_clipping_is_by_the_norm_of_all_gradients(most: float | None, norm: float):
    grads = {"a": torch.tensor([3.0, 4.0]), "b": (torch.tensor([[12.0]]),)}
    clipped, was = adamw.clipped(grads, most)
    assert was == 13
    assert torch.cat([clipped["a"], clipped["b"][0][0]]).norm().item() == pytest.approx(norm)
    assert (clipped["a"] / grads["a"]).diff() == 0


def test_no_gradient_at_all_is_clipped_to_none():
    grads, norm = adamw.clipped([torch.zeros(3)], 0.0)
    assert norm == 0 and torch.equal(grads[0], torch.zeros(3))


@pytest.mark.parametrize("clip", [None, 0.1])
def test_clipping_is_that_of_the_plain_loop(clip: float | None):
    batches = tokens(STEPS, 4, 17)[:5]
    want = plain_loop(SMALL, batches, clip)
    _, params, _, metrics = trained(SMALL, batches, "tape", settings=SETTINGS._replace(clip=clip))
    assert min(m["norm"].item() for m in metrics) > 0.2  # all would be clipped
    got = naming.named(unpacked(llama.blank(SMALL), params))
    assert all((got[n] - want[n]).abs().max() < 1e-6 for n in want)


def test_the_schedule_goes_by_the_step_that_is_donated():
    _, _, opt, metrics = trained(SMALL, tokens(STEPS, 2, 9), "tape")
    rates = [m["lr"].item() for m in metrics]
    assert opt.step.item() == STEPS
    assert rates == pytest.approx([SCHEDULE(torch.tensor(i)).item() for i in range(STEPS)])
    top = rates.index(max(rates))
    assert 4 <= top <= 6 and max(rates) == pytest.approx(3e-3, rel=0.05)
    assert rates[:top] == sorted(rates[:top]) and rates[top:] == sorted(rates[top:], reverse=True)
    assert SCHEDULE(torch.tensor(STEPS)).item() == pytest.approx(0.02 * 3e-3)
    assert SCHEDULE(torch.tensor(10 * STEPS)).item() == pytest.approx(0.02 * 3e-3)


def test_the_average_is_of_the_last_steps():
    _, params, opt, _ = trained(SMALL, tokens(1, 2, 9), None, average=True)
    begun = packed(naming.named(llama.init_params(SMALL)))
    expected = begun.matrices + 0.9 * (params.matrices - begun.matrices)
    torch.testing.assert_close(opt.average.matrices, expected)
    for steps, behind in ((2000, 200), (20_000, 1000)):  # of what grows by 1 a step
        average = torch.zeros(())
        for i in range(1, steps + 1):
            average = adamw.blended(average, torch.tensor(float(i)), torch.tensor(float(i)))
        assert (steps - average).item() == pytest.approx(behind, rel=0.02)


def test_layers_in_bfloat16_leave_masters_in_float32():
    batches = tokens(STEPS, 4, 17)[:10]
    loss = make_loss(SMALL, dtype=torch.bfloat16)
    _, got, opt, metrics = trained(SMALL, batches, "tape", loss)
    _, bare, *_ = trained(SMALL, batches, None, loss)
    _, wide, *_ = trained(SMALL, batches, "tape")
    assert {x.dtype for x in fg.core.trees.flatten((got, opt.first))[0]} == {torch.float32}
    assert torch.equal(got.matrices, bare.matrices)
    # a master keeps what a weight of 8 bits would round off: most of its steps
    assert not torch.equal(got.matrices, got.matrices.bfloat16().float())
    assert 1e-6 < (got.matrices - wide.matrices).abs().max() < 0.02
    assert metrics[-1]["loss"] < metrics[0]["loss"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device, recorder", DEVICES)
def test_gradients_are_those_of_backward(device: str, recorder: str, dtype: torch.dtype):
    loss, (batch,) = make_loss(SMALL, dtype=dtype), tokens(1, 4, 17, device=device)
    params = packed(naming.named(llama.init_params(SMALL, device=device)))

    def step(params: Any, batch: Tensor) -> Any:
        leaves, treedef = fg.core.trees.flatten(params)
        return gradients(lambda w: loss(fg.core.trees.unflatten(treedef, w), batch), leaves)

    leaves, treedef = fg.core.trees.flatten(params)
    leaves = [w.clone().requires_grad_() for w in leaves]
    with torch.enable_grad():
        value = loss(fg.core.trees.unflatten(treedef, leaves), batch)
        value.backward()
    want = [w.grad for w in leaves], value.detach()
    fast = fg.graphify(step, stage="batch", modes="FULL", recorder=recorder)
    for got in (step(params, batch), fast(params, batch)):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_a_step_can_be_derived():
    """By autograd, and by transforms; of its weights, and of its batch."""
    x, y, w = (torch.randn(4, 4, generator=torch.Generator().manual_seed(i)) for i in range(3))
    loss = lambda p, b: (b["x"] @ p["w"] - y).square().mean()  # noqa: E731
    settings = adamw.AdamW(eps=1.0, clip=None)
    train = make_train_step(loss, settings, adamw.constant(0.5))

    def after(w: Tensor, x: Tensor) -> Tensor:
        params, opt, _ = train({"w": w}, adamw.init({"w": w}), {"x": x})
        return loss(params, {"x": x}) + opt.step

    for i in (0, 1):
        way, e = torch.randn_like(w), 1e-2
        moved = [[z + by * (j == i) for j, z in enumerate((w, x))] for by in (e * way, -e * way)]
        want = (after(*moved[0]) - after(*moved[1])) / (2 * e)
        by_func = torch.func.grad(after, argnums=i)(w, x)
        given = [z.clone().requires_grad_(j == i) for j, z in enumerate((w, x))]
        with torch.enable_grad():
            (by_autograd,) = torch.autograd.grad(after(*given), given[i])
        for found in (by_func, by_autograd):
            torch.testing.assert_close((found * way).sum(), want, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(
        torch.func.vmap(after)(torch.stack([w, x]), torch.stack([x, w])),
        torch.stack([after(w, x), after(x, w)]),
    )
    with torch.inference_mode():
        torch.testing.assert_close(after(w.clone(), x.clone()), after(w, x))


def test_dropout_is_another_at_each_step():
    flat = Flat(torch.zeros(64, 1000).flatten(), torch.zeros(3))
    masks = [dropped(flat, torch.tensor(step), share=0.25, seed=seed)
             for step, seed in ((0, 0), (1, 0), (0, 1), (1000, 0))]  # fmt: skip
    assert torch.equal(dropped(flat, torch.tensor(1), share=0.25, seed=0), masks[1])
    for mask in masks:
        assert set(mask.tolist()) == {0, torch.tensor(4 / 3).item()}
        rows = (mask.view(64, 1000) == 0).float().mean(1)  # 0.014 is what chance does
        assert (rows - 0.25).abs().max() < 0.06 and 0.008 < rows.std() < 0.02
    off = torch.stack([mask == 0 for mask in masks]).float()
    apart = torch.corrcoef(off) - torch.eye(len(masks))
    assert apart.abs().max() < 0.02  # 0.004 is what chance does
    assert torch.corrcoef(torch.stack([off[0, 1:], off[0, :-1]]))[0, 1].abs() < 0.02


def test_what_is_drawn_is_of_the_step():
    loss = lambda params, batch, drawn: square(params, batch) * 0 + drawn  # noqa: E731
    step = make_train_step(
        loss, TREE, adamw.constant(0.1), draw=lambda params, step: step.float() + 5
    )
    params, opt, losses = weights(), adamw.init(weights()), []
    for _ in range(3):
        params, opt, metrics = step(params, opt, torch.ones(2, 3))
        losses.append(metrics["loss"].item())
    assert losses == [5, 6, 7]


def test_a_step_with_dropout_draws_on_the_device():
    def draw(flat: Flat, step: Tensor) -> Tensor:
        return dropped(flat, step, share=0.25, seed=1)

    batches = tokens(1, 4, 17).repeat(3, 1, 1)
    _, got, _, metrics = trained(SMALL, batches, "tape", draw=draw)
    _, bare, _, same = trained(SMALL, batches, None, draw=draw)
    _, other, *_ = trained(SMALL, batches, None)
    assert [m["loss"] for m in metrics] == [m["loss"] for m in same]
    assert torch.equal(got.matrices, bare.matrices)
    assert not torch.equal(got.matrices, other.matrices)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_that_are_made_again_give_the_same_weights_in_less_memory(dtype: torch.dtype):
    config = llama.Config(
        vocab_size=32, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, dim=32, mlp_dim=96
    )
    batches = tokens(2, 8, 129) % 32
    found = {}
    for checkpoint in (False, True):
        loss = make_loss(config, dtype=dtype, checkpoint=checkpoint)
        fast, params, _, metrics = trained(config, batches, "tape", loss)
        (row,) = fast.steps[0].memory.rows
        found[checkpoint] = params, metrics[-1]["loss"], row.estimated.pool, row.measured.pool
    (params, loss, estimated, measured), (again, same, less, fewer) = found[False], found[True]
    assert torch.equal(params.matrices, again.matrices) and torch.equal(loss, same)
    assert less < 0.6 * estimated and fewer < 0.7 * measured


def test_adamw_of_a_tree_decays_what_has_two_dims():
    leaves = {"w": torch.ones(2, 3), "b": torch.ones(3)}
    grads = fg.core.trees.map_leaves(torch.zeros_like, leaves)
    settings = adamw.AdamW(weight_decay=0.5)
    new, opt = adamw.update(settings, leaves, grads, adamw.init(leaves), torch.tensor(0.1))
    assert torch.equal(new["b"], leaves["b"]) and torch.allclose(new["w"], torch.tensor(0.95))
    assert opt.step == 1 and opt.average is None


def test_weights_come_back_as_they_were_packed(config, params):
    named = naming.named(params)
    flat = packed(named)
    again = naming.named(unpacked(llama.blank(config), flat))
    assert list(again) == list(named)
    assert all(torch.equal(again[n], named[n]) for n in named)
    assert all(w.data_ptr() % 256 == flat.matrices.data_ptr() % 256
               for w in again.values() if w.ndim > 1)  # fmt: skip
    assert packed({n: w.bfloat16() for n, w in named.items()}).matrices.dtype is torch.float32
    narrow = naming.named(unpacked(llama.blank(config), flat, torch.bfloat16))
    assert all(w.dtype is torch.bfloat16 for w in narrow.values())


def test_what_the_page_shows_runs(capsys):
    page = (Path(fg.__file__).parent.parent / "docs/training.md").read_text()
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(block, "training.md", "exec"), {"__name__": "training"})
    printed = capsys.readouterr().out
    assert printed.count("in place") == 2 * 7 and "copied" not in printed
    (kept, loss), (again, same) = (
        (float(estimated), loss)
        for loss, estimated in re.findall(r"^(\S+) Memory.*estimated: (\S+) MB", printed, re.M)
    )
    assert loss == same and again < 0.7 * kept


def weights() -> dict[str, Tensor]:
    """Some, one of which decays."""
    return {"w": torch.ones(3, 3), "v": torch.full((3, 3), 2.0), "b": torch.ones(3)}


def square(params: Any, batch: Any) -> Tensor:
    """A loss."""
    return ((batch @ params["w"] @ params["v"] + params["b"]) ** 2).mean()


def test_what_an_optimizer_is_given_may_have_its_keys_in_any_order():
    """As a checkpoint that was saved by name has them."""
    turned = lambda tree: {name: tree[name] for name in reversed(tree)}  # noqa: E731
    decays = {"w": True, "v": False, "b": False}
    grads = {name: torch.rand(w.shape) for name, w in weights().items()}
    opt = adamw.init(weights(), average=True)
    opt.first["w"] += 1
    opt.average["w"] += 1
    other = adamw.Moments(opt.step, *map(turned, (opt.first, opt.second, opt.average)))
    lr = torch.tensor(0.1)
    want, kept = adamw.update(adamw.AdamW(decays=decays), weights(), grads, opt, lr)
    settings = adamw.AdamW(decays=turned(decays))
    got, again = adamw.update(settings, weights(), turned(grads), other, lr)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    torch.testing.assert_close(again.first, kept.first, rtol=0, atol=0)
    torch.testing.assert_close(again.average, kept.average, rtol=0, atol=0)


def test_without_betas_a_step_is_by_the_sign_of_the_gradient():
    settings = adamw.AdamW(betas=(0.0, 0.0), eps=0.0, weight_decay=0.0)
    grads = {name: -torch.ones_like(w) for name, w in weights().items()}
    new, _ = adamw.update(settings, weights(), grads, adamw.init(weights()), torch.tensor(0.5))
    assert torch.equal(new["v"], torch.full((3, 3), 2.5))


def stepped(
    settings: adamw.AdamW = SETTINGS, *, accumulate: Any = 1, params: Any = None,
    batch: Any = (2, 3), first: Any = None, schedule: Any = None, loss: Any = None,
) -> Any:  # fmt: skip
    """One step of something."""
    params = weights() if params is None else params
    loss = loss or (lambda params, batch: square(params, batch["x"]))
    schedule = schedule or adamw.constant(0.1)
    step = make_train_step(loss, settings, schedule, accumulate=accumulate)
    opt = adamw.init(weights())
    opt = opt if first is None else adamw.Moments(opt.step, first, opt.second)
    return step(params, opt, {"x": torch.ones(batch)})


TREE = adamw.AdamW(decays=None)


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [(lambda: stepped(TREE, accumulate=4, batch=(2, 2, 3)), fg.errors.TreeError,
      r"batch\['x'\] is torch.float32 \(2, 2, 3\), and accumulate=4: .*\(4, ...\)"),
     (lambda: stepped(TREE, accumulate=4), fg.errors.TreeError, r"batch\['x'\] is .* \(2, 3\),"),
     (lambda: stepped(TREE, accumulate=2, batch=()), fg.errors.TreeError, r"h\['x'\] .* \(\)"),
     (lambda: stepped(TREE, accumulate=0), ValueError, "accumulate=0: pass .* 1 or more"),
     (lambda: stepped(TREE, accumulate=2.0), ValueError, "accumulate=2.0: pass"),
     (lambda: stepped(TREE, params=weights() | {"n": torch.tensor(3)}), fg.errors.TreeError,
      r"params\['n'\] is torch.int64 \(\), and weights that are trained are float32"),
     (lambda: stepped(TREE, params=weights() | {"n": torch.ones(3).bfloat16()}),
      fg.errors.TreeError, r"params\['n'\] is torch.bfloat16 \(3,\), and weights"),
     (lambda: adamw.init({"w": torch.ones(3), "n": 3}), fg.errors.TreeError,
      r"params\['n'\]=3 is an int. Pass a weight, a tensor"),
     (lambda: stepped(adamw.AdamW(decays={"w": True})), fg.errors.TreeError,
      r"decays is of another structure .*\n  decays\['b'\]: missing\n"),
     (lambda: stepped(TREE, first={"w": torch.ones(3, 3)}), fg.errors.TreeError,
      r"opt.first is of another structure .*\n  opt.first\['b'\]: missing\n"),
     (lambda: stepped(adamw.AdamW(betas=(0.9, 1.0))), ValueError, "pass two numbers from 0 up to"),
     (lambda: stepped(adamw.AdamW(clip=-1.0)), ValueError, "clip=-1.0.: pass a norm"),
     (lambda: stepped(adamw.AdamW(eps=-1e-8)), ValueError, "eps=-1e-08.: pass 0 or more"),
     (lambda: stepped(TREE, schedule=lambda step: 1e-3), fg.errors.TreeError,
      "the schedule gives 0.001, which is no tensor"),
     (lambda: stepped(TREE, schedule=lambda step: torch.ones(3)), fg.errors.TreeError, "no tensor"),
     (lambda: adamw.cosine(1e-3, 0), ValueError, r"cosine\(steps=0\): pass 1 or more"),
     (lambda: stepped(TREE, accumulate="4"), ValueError, "accumulate='4': pass"),
     (lambda: stepped(TREE, accumulate=True), ValueError, "accumulate=True: pass"),
     (lambda: stepped(adamw.AdamW), TypeError, r"settings=.* is a type. Pass AdamW\(...\)"),
     (lambda: stepped(TREE, schedule=1e-3), TypeError, r"schedule=0.001 .* constant\(3e-4\)"),
     (lambda: make_train_step(square, TREE, adamw.constant(1), frozen={}), TypeError,
      "frozen=.* True or False; the weights are an argument"),
     (lambda: make_train_step(None, TREE, adamw.constant(1)), TypeError, "loss=None"),
     (lambda: stepped(TREE, loss=lambda params, batch: batch["x"].sum()), fg.errors.TreeError,
      "does not depend on params"),
     (lambda: stepped(TREE, loss=lambda params, batch: params["w"].detach().sum()),
      fg.errors.TreeError, "does not depend on params"),
     (lambda: stepped(TREE, loss=lambda params, batch: params["w"]), fg.errors.TreeError,
      r"loss gives torch.float32 \(3, 3\): one float \(\)"),
     (lambda: stepped(TREE, loss=lambda params, batch: 3.0), fg.errors.TreeError, "gives 3.0")],
)  # fmt: skip
def test_what_no_step_can_be_made_of_is_refused(call: Any, kind: Any, text: str):
    with pytest.raises(kind, match=text):
        call()
