"""`from_module`: modules as pure functions; and callees under torch.compile."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch
import toys
from torch import Tensor, nn
from torch.func import grad_and_value
from torch.nn.utils import prune

import fngraph as fg
from fngraph.errors import ClosureError, LeakError, MutationError, RandomError, TreeError

MODES = ["NONE", "PIECEWISE", "FULL"]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def mlp(*extra: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(toys.E, 5), *extra, nn.Tanh(), nn.Linear(5, 3))


def check(net: nn.Module, modes: str = "FULL", name: str = "input") -> None:
    """Over tokens of a batch, and over exact shapes, `forward` is the module."""
    forward, params, buffers = fg.from_module(net)
    embed = torch.randn(toys.V, toys.E)

    def over_tokens(p: Any, b: Any) -> Tensor:
        return forward(p["params"], p["buffers"], p["embed"][b.token_ids])

    tokens = fg.graphify(
        over_tokens, modes=modes, stage="b", limits=toys.LIMITS, sizes=toys.SIZES
    )  # fmt: skip
    exact = fg.graphify(forward, modes=modes, stage=name)
    for batch in (toys.batch(3, 2), toys.decode(2), toys.batch(1)):
        x = embed[batch.token_ids]
        with torch.no_grad():
            want = net(x)
        held = {"params": params, "buffers": buffers, "embed": embed}
        torch.testing.assert_close(tokens(held, batch), want)
        torch.testing.assert_close(exact(params, buffers, x), want)
        assert not exact(params, buffers, x).requires_grad
    for fast in (tokens, exact):
        assert fast.stats.share(modes) == 1 and fast.stats.steps


# --- what is taken out ----------------------------------------------------------------------------


@pytest.mark.parametrize("modes", MODES)
def test_an_mlp(modes: str):
    check(mlp(), modes)


def test_the_tensors_are_the_modules_own_memory_without_gradients():
    net = mlp()
    forward, params, buffers = fg.from_module(net)
    assert list(params) == ["0.weight", "0.bias", "2.weight", "2.bias"] and buffers == {}
    for name, p in net.named_parameters():
        assert params[name].data_ptr() == p.data_ptr() and not params[name].requires_grad
    x, fast = torch.randn(2, toys.E), fg.graphify(forward, stage="input")
    fast(params, buffers, x)
    net.load_state_dict({n: torch.ones_like(p) for n, p in net.named_parameters()})
    torch.testing.assert_close(fast(params, buffers, x), net(x).detach())
    other = {name: p * 2 for name, p in params.items()}
    want = mlp()
    want.load_state_dict(other)
    torch.testing.assert_close(forward(other, buffers, x), want(x).detach())


class Positions(nn.Module):
    """Buffers, one of them not saved; a keyword and a default."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(toys.E, toys.E)
        self.register_buffer("scale", torch.rand(toys.E))
        self.register_buffer("shift", torch.rand(toys.E), persistent=False)

    def forward(self, x: Tensor, bias: Tensor | None = None, *, twice: bool = False) -> Tensor:
        x = self.lin(x) * self.scale + self.shift
        x = x if bias is None else x + bias
        return x * 2 if twice else x


@pytest.mark.parametrize("modes", MODES)
def test_a_module_with_buffers(modes: str):
    net = Positions()
    forward, params, buffers = fg.from_module(net)
    assert list(buffers) == ["scale", "shift"] and list(params) == ["lin.weight", "lin.bias"]
    step = lambda params, buffers, x: forward(params, buffers, x)  # noqa: E731
    x, fast = torch.randn(3, toys.E), fg.graphify(step, modes=modes, stage="x")
    torch.testing.assert_close(fast(params, buffers, x), net(x).detach())
    buffers["shift"] += 1  # held: read in place
    torch.testing.assert_close(fast(params, buffers, x), net(x).detach())


def test_the_signature_is_the_modules_own():
    net = Positions()
    forward, params, buffers = fg.from_module(net)
    assert str(inspect.signature(forward)).startswith("(params, buffers, x: ")
    assert list(inspect.signature(forward).parameters) == [
        "params",
        "buffers",
        "x",
        "bias",
        "twice",
    ]
    assert forward.__name__ == "Positions"
    x, bias = torch.randn(3, toys.E), torch.ones(toys.E)
    torch.testing.assert_close(forward(params, buffers, x, bias=bias, twice=True),
                               net(x, bias, twice=True).detach())  # fmt: skip


class Tallied(nn.Module):
    """Its forward says what a batch is; by the text of the annotation, as this file has it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(toys.V, toys.E)

    def forward(self, batch: toys.Batch) -> Tensor:
        return self.embed(batch.token_ids)


def test_the_annotation_of_the_modules_own_forward_says_what_a_batch_is():
    net, batch = Tallied(), toys.batch(3, 2)
    forward, params, buffers = fg.from_module(net)
    step = fg.graphify(forward, stage="batch", sizes=(8,)).bind(params, buffers)
    step = step.capture(toys.LIMITS, progress=False)
    torch.testing.assert_close(step(batch), net(batch).detach())

    net.forward.__func__.__annotations__["batch"] = "Local"
    try:
        forward, *_ = fg.from_module(net)
        with pytest.raises(
            TreeError, match=r"'batch' cannot be looked up.*capture\(..., batch=batch"
        ):
            fg.graphify(forward, stage="batch").trace(params, buffers)
    finally:
        net.forward.__func__.__annotations__["batch"] = "toys.Batch"


class Tied(nn.Module):
    """One matrix as embedding and as head; a child that appears under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(toys.V, toys.E)
        self.head = nn.Linear(toys.E, toys.V, bias=False)
        self.head.weight = self.embed.weight
        self.block = nn.Linear(toys.E, toys.E)
        self.again = self.block

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.again(torch.tanh(self.block(self.embed(ids)))))


@pytest.mark.parametrize("modes", MODES)
def test_tied_weights_are_listed_once_and_stay_tied(modes: str):
    net = Tied()
    forward, params, buffers = fg.from_module(net)
    assert list(params) == ["embed.weight", "block.weight", "block.bias"]
    fast = fg.graphify(lambda p, b: forward(p, buffers, b.token_ids), modes=modes, stage="b",
                       limits=toys.LIMITS, sizes=toys.SIZES)  # fmt: skip
    other = {name: torch.randn_like(p) for name, p in params.items()}
    batch, want = toys.batch(3, 2), Tied()
    want.load_state_dict(other, strict=False)
    torch.testing.assert_close(fast(other, batch), want(batch.token_ids).detach())
    assert fast.stats.share(modes) == 1


# --- modules that write, and modules that draw ----------------------------------------------------


@pytest.mark.parametrize("modes", MODES)
def test_a_batchnorm_that_evaluates(modes: str):
    net = mlp(nn.BatchNorm1d(5))
    net(torch.randn(16, toys.E))  # running statistics that are not the first ones
    check(net.eval(), modes)


# --- modules that keep tensors beside their parameters --------------------------------------------


def _old_weight_norm(part: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and still in many a checkpoint
        return nn.utils.weight_norm(part)


def _pruned(part: nn.Module) -> nn.Module:
    return prune.l1_unstructured(part, "weight", 0.5)


KEEPERS: dict[str, Any] = {
    "GRU": lambda: nn.GRU(4, 6, num_layers=2, batch_first=True),
    "LSTM both ways": lambda: nn.LSTM(4, 6, bidirectional=True),
    "RNN": lambda: nn.RNN(4, 6, nonlinearity="relu"),
    "an old weight_norm": lambda: _old_weight_norm(nn.Linear(4, 6)),
    "an old spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(4, 6)),
    "pruned": lambda: _pruned(nn.Linear(4, 6)),
    "several of them": lambda: nn.Sequential(_pruned(nn.Linear(4, 4)), nn.GRU(4, 6)),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 6)),
}


def namespaces(net: nn.Module) -> list[Any]:
    """All that a module and its parts hold, by identity; lists by what is in them."""
    return [
        (name, id(value), [id(x) for x in value] if isinstance(value, list | dict) else None)
        for part in net.modules()
        for name, value in vars(part).items()
    ]


@pytest.mark.parametrize("what", KEEPERS)
def test_what_torch_keeps_in_a_module_is_put_back(what: str):
    """An RNN's list of weights; what hooks compute before each call."""
    net = KEEPERS[what]().eval()
    x = torch.randn(3, 5, 4)
    net(x)
    before = namespaces(net)
    forward, params, buffers = fg.from_module(net)
    fast = fg.graphify(forward, stage=2)
    with torch.no_grad():
        want = net(x)
        before = namespaces(net)
        for call in (fast, forward, fast):
            toys.assert_trees(call(params, buffers, x), want, **toys.CLOSE)
            assert namespaces(net) == before
        toys.assert_trees(net(x), want)


class Keeping(nn.Module):
    """Keeps what it must not, and may then fail."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.gru, self.seen, self.fails = nn.GRU(4, 6), [], fails

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.gru(x)[0]
        self.seen.append(self.last)
        if self.fails:
            raise ValueError("mine")
        return self.last


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_refused_trace_leaves_in_a_module_is_put_back(fails: bool):
    net = Keeping(fails)
    before = namespaces(net)
    forward, params, buffers = fg.from_module(net)
    kind, words = (ValueError, "mine") if fails else (LeakError, r"Keeping\.last|a list")
    for _ in range(2):
        with pytest.raises(kind, match=words):
            fg.graphify(forward, stage=2)(params, buffers, torch.randn(3, 5, 4))
        assert namespaces(net) == before


NORMS = {
    "BatchNorm1d": lambda: nn.BatchNorm1d(5),
    "without a count": lambda: _uncounted(nn.BatchNorm1d(5)),
}


def _uncounted(norm: Any) -> Any:
    norm.num_batches_tracked = None
    return norm


@pytest.mark.parametrize("what", NORMS)
def test_a_batchnorm_that_trains_may_not_write_held_buffers(what: str):
    net = mlp(NORMS[what]())
    forward, params, buffers = fg.from_module(net)
    before = toys.clone(buffers)
    with pytest.raises(
        MutationError, match=r"buffers\['1\..*held, not donated.*donate=\"buffers\""
    ):
        fg.graphify(forward, stage="input")(params, buffers, torch.randn(4, toys.E))
    toys.assert_trees(buffers, before)


@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize("what", NORMS)
def test_a_batchnorm_that_trains_writes_donated_buffers(what: str, modes: str):
    net = mlp(NORMS[what]())
    forward, params, buffers = fg.from_module(net)

    def step(params: Any, buffers: Any, x: Tensor) -> Any:
        return forward(params, buffers, x), buffers

    fast, bare = fg.graphify(step, donate="buffers", stage="x", modes=modes), toys.clone(buffers)
    for n in (4, 6, 4):
        x = torch.randn(n, toys.E)
        want, _ = step(params, bare, x)
        got, back = fast(params, buffers, x)
        assert back is buffers
        torch.testing.assert_close(got, want)
        toys.assert_trees(buffers, bare, atol=1e-6, rtol=1e-6)
    assert net[1].running_mean.any() and fast.stats.share(modes) == 1


class Averaging(nn.Module):
    """Gives its buffers other tensors, and writes one of these in place."""

    mean: Tensor
    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(toys.E))
        self.register_buffer("last", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
        self.last = torch.roll(self.last, 1, 0)
        self.last[0] = x[0, 0]
        return (x - self.mean) * self.last.sum()


@pytest.mark.parametrize("modes", MODES)
def test_a_module_that_gives_its_buffers_other_tensors(modes: str):
    net = Averaging()
    forward, params, buffers = fg.from_module(Averaging())

    def step(params: Any, buffers: Any, x: Tensor) -> Any:
        return forward(params, buffers, x), buffers

    fast, bare = fg.graphify(step, donate="buffers", stage="x", modes=modes), toys.clone(buffers)
    for _ in range(4):
        x = torch.randn(4, toys.E)
        want = net(x)
        torch.testing.assert_close(step(params, bare, x)[0], want)
        got, back = fast(params, buffers, x)
        assert back is buffers
        torch.testing.assert_close(got, want)
        toys.assert_trees(buffers, dict(net.named_buffers()), atol=1e-6, rtol=1e-6)
    assert fast.stats.share(modes) == 1


def test_a_module_may_not_give_held_buffers_other_tensors():
    forward, params, buffers = fg.from_module(Averaging())
    with pytest.raises(MutationError, match=r"puts another tensor into buffers\['mean'\]"):
        fg.graphify(forward, stage="x")(params, buffers, torch.randn(4, toys.E))


class Untying(nn.Module):
    """Of two attributes that are one tensor it gives one another."""

    def __init__(self, both: bool) -> None:
        super().__init__()
        self.both, tied = both, torch.ones(toys.E)
        self.first, self.second = nn.Module(), nn.Module()
        self.first.register_buffer("scale", tied)
        self.second.register_buffer("scale", tied)

    def forward(self, x: Tensor) -> Tensor:
        self.first.scale = self.first.scale + 1
        if self.both:
            self.second.scale = self.first.scale
        return x * self.first.scale * self.second.scale


def test_tied_buffers_get_another_tensor_together_or_not_at_all():
    x = torch.randn(4, toys.E)
    net, (forward, params, buffers) = Untying(True), fg.from_module(Untying(True))
    for _ in range(3):
        assert torch.equal(forward(params, buffers, x), net(x))
    forward, params, buffers = fg.from_module(Untying(False))
    with pytest.raises(TreeError, match=r"Untying\.first\.scale .* was tied to second\.scale"):
        forward(params, buffers, x)
    assert torch.equal(buffers["first.scale"], torch.ones(toys.E))


@pytest.mark.parametrize("modes", MODES)
def test_a_training_step_over_a_module_with_batchnorm(modes: str):
    forward, params, buffers = fg.from_module(mlp(nn.BatchNorm1d(5)))

    def loss_of(params: Any, buffers: Any, x: Tensor) -> Any:
        return forward(params, buffers, x).square().mean(), buffers

    def step(params: Any, buffers: Any, x: Tensor) -> Any:
        grads, (loss, buffers) = grad_and_value(loss_of, has_aux=True)(params, buffers, x)
        return {n: p - 0.1 * grads[n] for n, p in params.items()}, buffers, loss

    fast = fg.graphify(step, donate=("params", "buffers"), stage="x", modes=modes)
    bare = toys.clone((params, buffers))
    for _ in range(3):
        x = torch.randn(4, toys.E)
        bare = (want := step(*bare, x))[:2]
        got = fast(params, buffers, x)
        assert got[0] is params and got[1] is buffers
        toys.assert_trees(got, want, atol=1e-6, rtol=1e-6)
    assert fast.stats.share(modes) == 1


def test_dropout_draws_when_it_trains_and_not_when_it_evaluates():
    net = mlp(nn.Dropout(0.5))
    check(net.eval())
    forward, params, buffers = fg.from_module(net.train())
    with pytest.raises(RandomError, match=r"dropout.*module\.eval\(\)"):
        fg.graphify(forward, stage="input")(params, buffers, torch.randn(4, toys.E))


def test_a_tensor_that_is_neither_parameter_nor_buffer():
    class Loose(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.rand(toys.E)

        def forward(self, input: Tensor) -> Tensor:
            return input * self.scale

    forward, params, buffers = fg.from_module(Loose())
    with pytest.raises(ClosureError, match=r"test_modules.py:\d+.*\(8,\)"):
        fg.graphify(forward, stage="input")(params, buffers, torch.randn(4, toys.E))


def test_a_lazy_module():
    with pytest.raises(TreeError, match=r"LazyLinear\.weight has no shape yet.*module\(x\)"):
        fg.from_module(nn.LazyLinear(3))


def test_a_forward_with_a_parameter_called_params():
    class Named(nn.Module):
        def forward(self, params: Tensor) -> Tensor:
            return params

    with pytest.raises(TreeError, match=r"Named.forward has a parameter 'params'.*Rename"):
        fg.from_module(Named())


# --- torch.compile --------------------------------------------------------------------------------


def bend(x: Tensor) -> Tensor:
    return torch.tanh(x) * 2


COMPILED = {
    "a function": lambda net, x: torch.compile(bend, backend="eager")(net(x)),
    "a module": lambda net, x: torch.compile(net, backend="eager")(x),
    "under grad": lambda net, x: torch.func.grad(
        lambda x: torch.compile(bend, backend="eager")(x).sum()
    )(net(x)),
    "under vmap": lambda net, x: torch.func.vmap(torch.compile(bend, backend="eager"))(net(x)),
}  # fmt: skip


@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize("what", COMPILED)
def test_a_compiled_callee_is_traced_as_what_was_compiled(what: str, modes: str):
    class Calls(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, input: Tensor) -> Tensor:
            return COMPILED[what](self.net, input)

    class Plain(Calls):
        def forward(self, input: Tensor) -> Tensor:
            x = self.net(input)
            if what == "under grad":
                return 2 / torch.cosh(x) ** 2
            return x if what == "a module" else bend(x)

    net, plain = Calls(), Plain()
    plain.load_state_dict(net.state_dict())
    forward, params, buffers = fg.from_module(net)
    fast = fg.graphify(forward, stage="input", modes=modes)
    x = torch.randn(4, toys.E)
    torch.testing.assert_close(fast(params, buffers, x), plain(x).detach())
    assert fast.stats.share(modes) == 1


def test_a_compiled_module_is_the_module_inside():
    net = mlp()
    forward, params, buffers = fg.from_module(torch.compile(net, backend="eager"))
    assert list(params) == [name for name, _ in net.named_parameters()]
    x = torch.randn(4, toys.E)
    got = fg.graphify(forward, stage="input")(params, buffers, x)
    torch.testing.assert_close(got, net(x).detach())


def test_a_forward_that_is_compiled_itself():
    def forward(w: Tensor, x: Tensor) -> Tensor:
        return bend(x @ w)

    w, x = torch.randn(4, 3), torch.randn(2, 4)
    fast = fg.graphify(torch.compile(forward, backend="eager"), stage="x")
    torch.testing.assert_close(fast(w, x), forward(w, x))
