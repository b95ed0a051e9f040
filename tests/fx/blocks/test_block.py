"""`fg.block`: traced once, stamped for the rest, and the graph is the one without it."""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import toys
from graphs_alike import assert_alike
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fngraph as fg
from fngraph.errors import BranchError, ClosureError, HostSyncError, MutationError, PurityError
from fngraph.models.families import decoder, llama

L = 5
RUNS: list[str] = []  # a global, which a trace does not see: one entry each time a body is run


def plain(fn: Callable[..., Any]) -> Callable[..., Any]:
    """No mark."""
    return fn


def counted(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Notes each run of a body."""

    @functools.wraps(fn)
    def body(*args: Any, **kwargs: Any) -> Any:
        RUNS.append(fn.__name__)
        return fn(*args, **kwargs)

    return body


def marked(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The mark, and a note of each run of the body."""
    return fg.block(counted(fn))


def params(layers: int = L) -> dict[str, Any]:
    """A square and a vector a layer."""
    draw = torch.Generator().manual_seed(0)
    rand = functools.partial(torch.rand, generator=draw)
    return {
        "embed": rand(toys.V, toys.E),
        "w": [rand(toys.E, toys.E) for _ in range(layers)],
        "b": [rand(toys.E) for _ in range(layers)],
    }


def state(layers: int = L) -> list[Tensor]:
    """A donated leaf a layer."""
    return [torch.zeros(toys.V, toys.E) for _ in range(layers)]


def traced(forward: Any, *args: Any) -> Any:
    """`forward(p, s, b)`, traced over abstract arguments."""
    made = fg.graphify(forward, donate="s", stage="b", limits=toys.LIMITS)
    return made.trace(*(args or (params(), state())), batch=toys.batch(2))


def check(model: Callable[[Any], Any], runs: int, *args: Any) -> Any:
    """`model(mark)` gives the same graph with the mark as without, with `runs` runs of the body.

    And the same values, in two modes and over batches of other sizes.
    """
    want = traced(model(plain), *args)
    RUNS.clear()
    got = traced(model(marked), *args)
    assert len(RUNS) == runs
    assert_alike(got, want)
    given, old = args or (params(), state())
    for modes in ("FULL", "NONE"):
        made = fg.graphify(
            model(fg.block), modes=modes, donate="s", stage="b", limits=toys.LIMITS, sizes=(8, 16)
        )
        held, kept = toys.clone(old), toys.clone(old)
        for rows in ((3, 1), (1,), (1, 1), (5,)):
            out, held = made(given, held, toys.batch(*rows))
            wanted, kept = toys.bare(model(plain), given, kept, toys.batch(*rows))
            toys.assert_trees((out, held), (wanted, kept), atol=1e-5, rtol=1e-5)
    return got


def loop(make: Callable[[Any], Any]) -> Any:
    """A model of L calls `x = layer(i, x, p, s, b)`, where `layer = make(mark)`."""

    @functools.wraps(make)
    def model(mark: Any) -> Any:
        layer = make(mark)

        def forward(p: Any, s: Any, b: Any) -> Any:
            x = p["embed"][b.token_ids]
            for i in range(L):
                x = layer(i, x, p, s, b)
            return x, s

        return forward

    return model


SAME: list[Any] = []


def same(runs: int) -> Any:
    """Puts a model among those to `check`: the name of its test, and runs of its bodies."""

    def register(model: Any) -> Any:
        SAME.append(pytest.param(model, runs, id=model.__name__))
        return model

    return register


def stack(body: Callable[..., Any], of: Callable[..., Any] | None = None) -> Any:
    """A model of calls `x, s[i] = body(x, w, b, s[i])`, or `body(*of(i, x, p, s, batch))`."""

    def model(mark: Any) -> Any:
        layer = mark(body)

        def forward(p: Any, s: Any, b: Any) -> Any:
            x, kept = p["embed"][b.token_ids], []
            for i in range(len(s)):
                args = of(i, x, p, s, b) if of else (x, p["w"][i], p["b"][i], s[i])
                x, new = layer(*args)
                kept.append(new)
            return x * 1, kept

        return forward

    return model


# --- the same graph -------------------------------------------------------------------------------


def functional(x: Tensor, w: Tensor, b: Tensor, s: Tensor) -> Any:
    return torch.relu(x @ w) + b, s * 0.5 + b


def in_place(x: Tensor, w: Tensor, b: Tensor, s: Tensor) -> Any:
    """Written whole, through a view, and read in between."""
    s.add_(b)
    y = x @ w + s[0]
    s[1:3].mul_(2)
    s.view(-1)[:2].fill_(1)
    return y, s


def temporary_in_place(x: Tensor, w: Tensor, b: Tensor, s: Tensor) -> Any:
    x.mul_(w[0])
    y = x + b
    y += 1
    y.unsqueeze_(0)
    return y.squeeze(0), s


def literals(x: Tensor, w: Tensor, b: Tensor, s: Tensor) -> Any:
    """One that is read, one that is written, one of another dtype, one that is returned."""
    gain = torch.tensor([1.0, 2.0] * (toys.E // 2))
    written = torch.tensor([0.5, 1.5])
    written.add_(1)
    half = torch.tensor(0.5, dtype=torch.float64).float()
    return x * gain + written[1] + half, s + gain


def sizes(x: Tensor, w: Tensor, b: Tensor, s: Tensor) -> Any:
    """T in many ways."""
    T = x.shape[0]
    y = x.view(T * 2, -1).reshape(-1, toys.E) + torch.arange(T)[:, None]
    y = y + x.new_zeros(T, toys.E) + torch.cat([x, x])[:T] + torch.ones(2 * T + 1)[T:-1, None]
    y = y + x.repeat(2, 1)[T:] + x.repeat_interleave(2, 0)[::2]
    return fg.trust_rows(torch.nn.functional.pad(y, (0, 0, 1, 2))[1:-2] * 1), s


def many_outputs(x: Tensor, w: Tensor, b: Tensor, s: Tensor) -> Any:
    q, k = (x @ w).chunk(2, -1)
    top, where = torch.cat([k, q], -1).topk(toys.E)
    return top * 1 + where, s


def complex_numbers(x: Tensor, w: Tensor, b: Tensor, s: Tensor) -> Any:
    """Views of another dtype, in the memory of an input and in memory of its own."""
    turned = torch.view_as_complex(x.contiguous().unflatten(-1, (-1, 2))) * (1 + 2j)
    return torch.view_as_real(turned).flatten(1) + b.view(torch.int32).view(torch.float32), s


def with_autocast(x: Tensor, w: Tensor, b: Tensor, s: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        y = x @ w
    return y.float() + b, s


def with_transforms(x: Tensor, w: Tensor, b: Tensor, s: Tensor) -> Any:
    y = torch.func.vmap(lambda row: row @ w)(x)
    slope = torch.func.grad(lambda b: (b**2).sum())(b)
    return y + slope, s


def conjugate(x: Tensor, w: Tensor, b: Tensor, s: Tensor) -> Any:
    """A view that differs from another in a bit."""
    turned = torch.view_as_complex((x * 1).unflatten(-1, (-1, 2))).conj()
    return torch.view_as_real(turned.resolve_conj()).flatten(1) + b, s


BODIES: dict[str, Callable[..., Any]] = {
    fn.__name__: fn
    for fn in (
        functional, in_place, temporary_in_place, literals, sizes, many_outputs, complex_numbers,
        with_autocast, with_transforms,
    )
} | {
    "a cut that writes into its own": lambda x, w, b, s: (toys.double(x @ w) + b, s),
    "T is first asked in a layer": lambda x, w, b, s: (
        torch.relu(x.view(x.shape[0], 2, -1).flatten(1) @ w) + b, s),
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", BODIES)
def test_the_graph_is_the_one_without(name: str):
    check(stack(BODIES[name]), 1)


def test_conjugate_views_are_traced_each_time():
    want = traced(stack(conjugate)(plain))
    RUNS.clear()
    assert_alike(traced(stack(conjugate)(marked)), want)
    assert len(RUNS) == L


def test_a_llama():
    config = llama.Config(
        vocab_size=32, num_layers=4, num_heads=2, num_kv_heads=1, head_dim=4, dim=8, mlp_dim=8
    )
    given = llama.init_params(config), llama.init_cache(config, 4)

    def graph() -> Any:
        made = fg.graphify(llama.forward, donate="cache", stage="batch")
        return made.trace(*given, limits=toys.LIMITS)

    got = graph()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "decoder_layer", decoder.decoder_layer.__wrapped__)
        want = graph()
    assert_alike(got, want)
    assert len(got.split().distinct) == 3


# --- what a call can see --------------------------------------------------------------------------


def test_layers_of_two_kinds_are_traced_once_each():
    """Shapes, strides, dtypes: whatever differs is another signature."""

    def body(x: Tensor, w: Tensor, s: Tensor) -> Any:
        return (x.to(w.dtype) @ w).float() + 1, s + 1

    kinds = [
        torch.rand(8, 8), torch.rand(8, 8).t(), torch.rand(8, 8).double(),
        torch.rand(8, 16)[:, ::2], torch.randint(3, (8, 8), dtype=torch.int32), torch.rand(8, 8),
    ]  # fmt: skip
    given = {"embed": torch.rand(toys.V, 8), "w": kinds + kinds}
    model = stack(body, of=lambda i, x, p, s, b: (x, p["w"][i], s[i]))
    check(model, 5, given, state(len(given["w"])))


def test_layers_that_share_a_leaf():
    """Each odd layer reads and writes the cache of the one before it."""

    def body(x: Tensor, mine: Tensor, other: Tensor) -> Any:
        mine.add_(1)
        y = x + other[0] * 2
        other.mul_(2)
        return y + mine[0], mine

    check(stack(body, of=lambda i, x, p, s, b: (x, s[i], s[i - i % 2])), 2)


def test_arguments_in_another_place():
    """The same leaf twice, two views of one, two leaves crosswise."""

    def body(x: Tensor, a: Tensor, b: Tensor, s: Tensor) -> Any:
        a.mul_(3)
        return x + a.sum() - b.sum(), s

    def arguments(i: int, x: Tensor, p: Any, s: Any, b: Any) -> Any:
        pairs = [
            (s[0], s[1]),
            (s[1], s[0]),  # alike
            (s[2], s[2]),
            (s[0][:2], s[0][:2]),
            (s[4][:2], s[4][:2]),  # which are views of the next argument
            (s[5], s[5].view(s[5].shape)),
            (s[6].view(s[6].shape), s[6]),
        ]
        return x, *pairs[i], s[i]

    check(stack(body, of=arguments), 6, params(), state(7))


@same(2)
def views_that_begin_elsewhere(mark: Any) -> Any:
    def body(x: Tensor, part: Tensor) -> Any:
        part.view(-1).add_(1)
        return x + part.sum(), part

    forward = stack(body, of=lambda i, x, p, s, b: (x, s[i][i % 2 :][:2]))(mark)
    return lambda p, s, b: (forward(p, s, b)[0], s)


@same(1)
@loop
def views_and_inputs_come_back(mark: Any) -> Any:
    """What a body returns may be an input, a view of one, one made twice, or no tensor."""

    @mark
    def body(x: Tensor, s: Tensor, n: int) -> Any:
        y = x * 2
        part = s[1:3]
        part.add_(1)
        return {"x": x, "y": [y, y, y[:, :2]], "part": part, "s": s, "n": (n, None, x.shape[0])}

    def layer(i: int, x: Tensor, p: Any, s: Any, b: Any) -> Tensor:
        out = body(x, s[i], 3)
        assert out["x"] is x and out["y"][0] is out["y"][1] and out["s"] is s[i]
        assert list(out) == ["x", "y", "part", "s", "n"] and out["n"][:2] == (3, None)
        out["part"].mul_(2)  # in the leaf
        out["y"][2].add_(1)  # in y
        return out["y"][0] + out["y"][1] + x.new_ones(out["n"][2])[:, None]

    return layer


@same(2)
def nested_marks(mark: Any) -> Any:
    inner = mark(lambda x, w: torch.relu(x @ w) + torch.tensor([1.0] * toys.E))
    outer = mark(lambda x, p, s: (inner(inner(x, p["w"][0]), p["w"][1]), s.add_(1)))

    def forward(p: Any, s: Any, b: Any) -> Any:
        x = inner(p["embed"][b.token_ids], p["w"][2])
        kept = []
        for i in range(L):
            x, new = outer(x, p, s[i])
            kept.append(new)
        return inner(x, p["w"][3]), kept

    return forward


@same(L + 1)
def a_layer_defined_in_the_loop(mark: Any) -> Any:
    """Its closure is what it sees; `i` differs, the weights do not."""

    def forward(p: Any, s: Any, b: Any) -> Any:
        x = p["embed"][b.token_ids]
        for i in range(L):
            w = p["w"][i]
            by_index = mark(lambda x: x @ p["w"][i] * (i + 1))  # noqa: B023
            by_value = mark(lambda x: x @ w + 1)  # noqa: B023
            x = by_value(by_index(x))
        return x * 1, s

    return forward


@dataclasses.dataclass(frozen=True)
class Times:
    """A value with a method."""

    by: int

    def once(self) -> int:
        return self.by


def recursive(value: int) -> Callable[..., int]:
    """A function that closes over itself, and over a variable that is not set."""

    def down(n: int = 2) -> int:
        return down(n - 1) if n else value

    def unset() -> Any:
        return never

    if value > 100:
        never = value
    return lambda: down() if unset else 0


def marked_by(value: Any) -> Any:
    """A function that returns what was put on it."""

    def get() -> Any:
        return get.value

    get.value = value
    return get


class Row(tuple):
    """A tuple that one may put something on."""


class Table(dict):
    """A dict, likewise."""


def noted(thing: Any, value: Any) -> Any:
    thing.noted = value
    return thing


@same(2)
def kernels_that_are_chosen_in_between(mark: Any) -> Any:
    """Attention by another kernel is another op."""

    @mark
    def body(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q)

    def forward(p: Any, s: Any, b: Any) -> Any:
        x = (p["embed"] * 1).view(1, toys.V, 2, -1).transpose(1, 2).contiguous()
        for kernel in [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH] * 2:
            with sdpa_kernel(kernel):
                x = body(x).contiguous()
        return x * 1, s

    return forward


def closing_over(values: Any) -> Any:
    """A model whose one body reads a variable of `forward` that is set anew for each layer."""

    def model(mark: Any) -> Any:
        def forward(p: Any, s: Any, b: Any) -> Any:
            x = p["embed"][b.token_ids]
            value: Any = None

            @mark
            def body(x: Tensor) -> Tensor:
                if hasattr(value, "noted"):
                    return x * value.noted
                got = value() if callable(value) else value
                got = got[0] if isinstance(got, tuple | list) else got
                return x + len(got) if isinstance(got, str | dict) else x * got

            for value in values(p, s, b, x):  # noqa: B007
                x = body(x)
            return x * 1, s

        return forward

    return model


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("values", "runs"),
    [
        (lambda p, s, b, x: [Times(v).once for v in (1, 2, 1)], 2),
        (lambda p, s, b, x: [recursive(v) for v in (1, 2, 1)], 2),
        (lambda p, s, b, x: [1, 2, 1, 2], 2),
        (lambda p, s, b, x: [1, 1.0, True, 1], 3),
        (lambda p, s, b, x: [0.0, -0.0, 0.0], 2),
        (lambda p, s, b, x: p["b"], 1),
        (lambda p, s, b, x: [p["b"][0], p["embed"][0], p["b"][1].clone()], 3),
        (lambda p, s, b, x: [(v, {"a": v}) for v in p["b"]], 1),
        (lambda p, s, b, x: [[v] for v in p["b"]], 1),
        (lambda p, s, b, x: [lambda: 1, lambda: 2, lambda: 3], 3),
        (lambda p, s, b, x: [lambda v=v: v for v in (1, 2, 1)], 2),
        (lambda p, s, b, x: [lambda v=v: v for v in p["b"]], 1),
        (lambda p, s, b, x: [lambda *, v=v: v for v in (1, 2, 1)], 2),
        (lambda p, s, b, x: [functools.partial(max, v, 1) for v in (1, 2, 1)], 2),
        (lambda p, s, b, x: [v.sum for v in p["b"]], None),
        (lambda p, s, b, x: [{"a": 1, "b": 1}, {"b": 1, "a": 1}, {"a": 1}], 3),
        (lambda p, s, b, x: [lambda n=x.shape[0] + i: torch.ones(n)[0] for i in (0, 1, 0)], 2),
        (lambda p, s, b, x: ["a", "ab", "a"], 2),
        (lambda p, s, b, x: [marked_by(v) for v in (1, 2, 1)], 2),
        (lambda p, s, b, x: [noted(functools.partial(len), v) for v in (1, 2, 1)], 2),
        (lambda p, s, b, x: [noted(Row((3,)), v) for v in (1, 2, 1)], 2),
        (lambda p, s, b, x: [noted(Row((v,)), 3) for v in (1, 2, 1)], 2),
        (lambda p, s, b, x: [noted(Table(a=3), v) for v in (1, 2, 1)], 2),
    ],
)
def test_closed_over_values(values: Any, runs: int | None):
    """Equal ones are stamped, others traced; `None`: as many as there are."""
    check(closing_over(values), L if runs is None else runs)


@pytest.mark.parametrize(
    "value",
    [
        torch.nn.Linear(2, 2),
        object(),
        {1: [object()]},
        iter(()),
        [].append,
        {1, 2},
        Table,
        Table.fromkeys,
        types.ModuleType("settings"),
        contextvars.ContextVar("setting"),
        memoryview(bytearray(1)),
    ],
    ids=lambda v: type(v).__name__,
)
def test_what_has_a_state_is_traced_each_time(value: Any):
    """It may have changed, and nothing would show it."""
    check(stack(lambda x, s, value: (x + 1, s), of=lambda i, x, p, s, b: (x, s[i], value)), L)


@same(L)
def an_object_that_counts_its_calls(mark: Any) -> Any:
    class Counter:
        calls = 0

    def body(x: Tensor, s: Tensor, counter: Counter) -> Any:
        counter.calls += 1
        return x * counter.calls, s

    counter = Counter()
    return stack(body, of=lambda i, x, p, s, b: (x, s[i], counter))(mark)


@same(5 * L)
def a_body_that_changes_its_arguments_is_traced_each_time(mark: Any) -> Any:
    @mark
    def appends(x: Tensor, kept: list[Tensor], seen: dict[str, Tensor]) -> Tensor:
        kept.append(x + 1)
        return x * 2

    @mark
    def renames(x: Tensor, w: Tensor, seen: dict[str, Tensor]) -> Tensor:
        seen["x"] = x
        return x * 2 + w

    @mark
    def swaps(x: Tensor, pair: list[Tensor]) -> Tensor:
        pair.reverse()
        return x + pair[0]

    reshapes = mark(lambda x: x.unsqueeze_(0)[0] + 1)

    def forward(p: Any, s: Any, b: Any) -> Any:
        x, kept, calls = p["embed"][b.token_ids], [], 0

        @mark
        def counts(x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return x * calls

        for i in range(L):
            x = appends(x, kept, {})
            seen = {"x": p["embed"]}
            x = renames(x, p["b"][i], seen) + seen["x"]
            pair = [p["b"][0], p["b"][1]]
            x = swaps(x, pair) * pair[0]
            x = counts(reshapes(x * 1))
        return (x + sum(kept), kept), s

    return forward


@same(5 + 2)
def ambient_state_is_seen(mark: Any) -> Any:
    def body(x: Tensor, w: Tensor, s: Tensor) -> Any:
        return (x @ w).float() + torch.ones(toys.E).float(), s

    layer = mark(body)

    def forward(p: Any, s: Any, b: Any) -> Any:
        x = p["embed"][b.token_ids]
        for _ in range(2):
            x, _ = layer(x, p["w"][0], s[0])
            with torch.autocast("cpu", torch.bfloat16):
                x, _ = layer(x, p["w"][1], s[1])
                with torch.autocast("cpu", torch.float16):
                    x, _ = layer(x, p["w"][1], s[1])
            torch.set_default_dtype(torch.float64)
            try:
                x, _ = layer(x, p["w"][2], s[1])
            finally:
                torch.set_default_dtype(torch.float32)
            with torch.set_grad_enabled(not torch.is_grad_enabled()):
                x, _ = layer(x, p["w"][3], s[3])
            with torch.device("cpu"):  # a function mode of torch's, another one each time
                x, _ = layer(x, p["w"][4], s[4])
        return x, s

    return forward


@same(L)
def a_function_mode_of_the_users(mark: Any) -> Any:
    """It may do anything at each call."""

    class Louder(torch.overrides.TorchFunctionMode):
        volume = 1

        def __torch_function__(self, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func is torch.relu:
                self.volume += 1
                return out * self.volume
            return out

    forward = stack(functional)(mark)

    def inside(p: Any, s: Any, b: Any) -> Any:
        with Louder():
            return forward(p, s, b)

    return inside


@fg.struct
class Scaled:
    """A tensor, and a number that is part of its structure."""

    w: Tensor
    by: Any = fg.static()


@same(3)
def static_fields_are_seen(mark: Any) -> Any:
    """1 and 1.0 are equal, and make a difference: of whole numbers, one makes floats."""

    def body(x: Tensor, scaled: Scaled) -> Any:
        return x + (torch.arange(toys.E) * scaled.by / 2 + scaled.w), scaled.w * 1

    stacked = stack(body, of=lambda i, x, p, s, b: (x, Scaled(p["b"][i], (1, 1.0, 2, 1, 1.0)[i])))

    forward = stacked(mark)
    return lambda p, s, b: (forward(p, s, b), s)


def test_functions_of_one_code_and_other_globals_are_others():
    """As one that is defined alike in two modules."""
    code = (lambda x: x * GAIN).__code__  # noqa: F821
    scaled = [types.FunctionType(code, {"GAIN": 2.0 + i}) for i in range(2)]
    body = lambda x, fn, s: (fn(x), s)  # noqa: E731
    check(stack(body, of=lambda i, x, p, s, b: (x, scaled[i % 2], s[i])), 2)


def test_a_literal_that_is_passed_on_is_looked_at():
    """Its values are known to a trace, which may go another way for them."""

    def body(x: Tensor, lit: Tensor, s: Tensor) -> Any:
        return x * (3 if torch.allclose(lit, torch.tensor([2.0])) else 1) + lit, s

    check(stack(body, of=lambda i, x, p, s, b: (x, torch.tensor([float(i)]), s[i])), L)


@same(L)
@loop
def a_literal_that_comes_back(mark: Any) -> Any:
    """The caller may ask for its values, which a copy of the nodes would not know."""
    body = mark(lambda x: (x * 2, torch.tensor([2.0])))

    def layer(i: int, x: Tensor, *_: Any) -> Tensor:
        x, two = body(x)
        return x + (1 if torch.allclose(two, torch.tensor([2.0])) else 0)

    return layer


class Box:
    """An object that is no tree, and is not equal to another."""

    value: Any = None


@same(2 * L)
@loop
def what_comes_back_with_a_state_is_made_each_time(mark: Any) -> Any:
    in_a_set = mark(lambda x: (x * 2, {1}))

    @mark
    def boxed(x: Tensor) -> Any:
        box = Box()
        box.value = x * 2
        return box

    def layer(i: int, x: Tensor, *_: Any) -> Tensor:
        x, found = in_a_set(boxed(x).value)
        found.add(2)
        return x

    return layer


HANDED_OVER: list[Tensor] = []


@pytest.mark.parametrize(
    "body",
    [
        lambda x: (x, x + HANDED_OVER[-1]),  # shows in the graph as no argument
        lambda x: (x * 2, HANDED_OVER[-1]),  # returned as it is
    ],
    ids=["arrives", "comes back"],
)
def test_tensors_that_pass_behind_the_arguments(body: Any):
    """In a global, at which nobody looks."""

    @loop
    def model(mark: Any) -> Any:
        marked_body = mark(body)

        def layer(i: int, x: Tensor, p: Any, *_: Any) -> Tensor:
            HANDED_OVER.append(p["b"][i])
            x, other = marked_body(x)
            HANDED_OVER.pop()
            return x + other

        return layer

    check(model, L)


# --- transforms -----------------------------------------------------------------------------------


@same(8)
def inside_a_transform_the_body_is_traced_each_time(mark: Any) -> Any:
    """grad, vmap and jvp see what no graph node shows."""
    body = mark(lambda x, w: torch.tanh(x @ w))

    def forward(p: Any, s: Any, b: Any) -> Any:
        def loss(w: list[Tensor]) -> Tensor:
            x = p["embed"][:3]
            for one in w:
                x = body(x, one)
            return (x**2).sum()

        x = body(body(p["embed"][b.token_ids], p["w"][0]), p["w"][1])  # runs once
        grads = torch.func.grad(loss)(p["w"][:3])  # three times
        rows = torch.func.vmap(body)(p["embed"][None], p["w"][0][None])[0]  # once
        slope = torch.func.jvp(loss, (p["w"][:2],), (p["w"][2:4],))[1]  # twice
        inside = torch.func.vmap(lambda row: row + body(p["embed"], p["w"][1]))  # once
        return (x + 1, grads, rows + slope, inside(p["embed"])), s

    return forward


@same(5)
def recorded_gradients(mark: Any) -> Any:
    """Without functorch: a leaf made inside, and .backward() through marked layers."""
    body = mark(lambda x, w: torch.tanh(x @ w))
    makes = mark(lambda w: w.detach().clone().requires_grad_())

    def forward(p: Any, s: Any, b: Any) -> Any:
        with torch.enable_grad():
            first, second = makes(p["w"][0]), makes(p["w"][1])
            x = body(body(body(p["embed"] * 1, p["w"][2].clone()), first), second)
            grads = torch.autograd.grad((x**2).sum(), [first, second])
        return [grad * 1 for grad in grads], s

    return forward


# --- errors and assumptions -----------------------------------------------------------------------


def writes(x: Tensor, w: Tensor, b: Tensor, s: Tensor) -> Any:
    s.add_(1)
    return x @ w + s[0], s


WRONG = {  # given to one layer -> (the body, which argument, as what, error)
    "a held leaf": (writes, 3, lambda p, b: p["more"], MutationError, r'p\["more"\]|p\[.more.\]'),
    "a staged leaf": (writes, 3, lambda p, b: b.token_ids, MutationError, r"b\.token_ids"),
    "from outside": (functional, 2, lambda p, b: OUTSIDE, ClosureError, ""),
}
OUTSIDE = torch.ones(toys.E)


@pytest.mark.parametrize("last", [0, L - 1])
@pytest.mark.parametrize("mark", [plain, fg.block])
@pytest.mark.parametrize("what", WRONG)
def test_a_layer_is_refused_be_it_the_first_or_the_last(what: str, mark: Any, last: int):
    body, place, wrong, error, path = WRONG[what]

    def arguments(i: int, x: Tensor, p: Any, s: Any, b: Any) -> Any:
        args = [x, p["w"][i], p["b"][i], s[i]]
        return [*args[:place], wrong(p, b), *args[place + 1 :]] if i == last else args

    given = params() | {"more": torch.zeros(toys.V, toys.E)}
    with pytest.raises(error, match=rf"(?s)test_block\.py:\d+.*({path})"):
        traced(stack(body, of=arguments)(mark), given, state())


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (lambda x, s: (x * x.sum().item(), s), HostSyncError),
        (lambda x, s: (x[x > 0], s), HostSyncError),
        (lambda x, s: (x + torch.rand(8), s), PurityError),
        (lambda x, s: (x * 2 if x.shape[0] > 4 else x, s), BranchError),
    ],
)
def test_impure_bodies_are_refused_with_the_mark_as_without(body: Any, error: Any):
    said = []
    for mark in (plain, fg.block):
        with pytest.raises(error) as caught:
            traced(stack(body, of=lambda i, x, p, s, b: (x, s[i]))(mark))
        said.append(str(caught.value))
    assert said[0] == said[1] and "test_block.py" in said[0]


def test_assumptions_are_the_same():
    model = stack(
        lambda x, s: (x * 2 if x.shape[0] < 100 else x, s), of=lambda i, x, p, s, b: (x, s[i])
    )
    got = check(model, 1)
    assert len(got.graph.assumptions) == 1


def test_the_lines_are_those_of_the_body():
    got = traced(stack(functional)(fg.block))
    found = [n.meta["stack_trace"] for n in got.graph.gm.graph.nodes if "relu" in str(n.target)]
    line = functional.__code__.co_firstlineno + 1
    assert len(found) == L and all(where.endswith(f"test_block.py:{line}") for where in found)


# --- outside a trace ------------------------------------------------------------------------------


def test_outside_a_trace_it_is_the_function():
    x, w, b, s = torch.rand(2, 8), torch.rand(8, 8), torch.rand(8), torch.rand(3, 8)
    layer = marked(functional)
    RUNS.clear()
    for _ in range(3):
        toys.assert_trees(layer(x, w, b=b, s=s), functional(x, w, b, s))
    assert len(RUNS) == 3
    layer = fg.block(functional)
    assert layer.__name__ == "functional" and layer.__wrapped__ is functional
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    toys.assert_trees(compiled(x, w, b, s), functional(x, w, b, s))
    w.requires_grad_()
    layer(x, w, b, s)[0].sum().backward()
    assert w.grad is not None


def test_nothing_is_kept_between_traces():
    """Another trace is another table: the body is run again."""
    model = stack(functional)(marked)
    RUNS.clear()
    for _ in range(2):
        traced(model)
    assert len(RUNS) == 2


@same(4)
def a_method_and_keywords(mark: Any) -> Any:
    @dataclasses.dataclass(frozen=True)
    class Layer:
        scale: float

        @fg.block
        def __call__(self, x: Tensor, *, w: Tensor, bias: Any = None) -> Tensor:
            RUNS.append("")
            return x @ w * self.scale + (0 if bias is None else bias)

    def forward(p: Any, s: Any, b: Any) -> Any:
        x = p["embed"][b.token_ids]
        call = Layer.__call__.__wrapped__ if mark is plain else Layer.__call__
        for scale in (1.0, 2.0, 1.0):
            x = call(Layer(scale), x, w=p["w"][0])
            x = call(Layer(scale), x, bias=p["b"][0], w=p["w"][0])
        return x, s

    return forward


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("model", "runs"), SAME)
def test_models_are_the_same_marked_or_not(model: Any, runs: int):
    check(model, runs)
