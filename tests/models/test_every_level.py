"""Every level of compilation in every mode is bare `forward`, on every family and either recorder.

Requests of a few tokens join, go on and are decoded, once in a step beyond the ladder; logits and
caches are compared after each step. On the CPU a sample runs, as C++ takes long to compile: each
family as it was traced with all passes and as compiled pieces, each level in each mode on one of
them. On a GPU all of it does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import toys
from torch import Tensor

import fngraph as fg
from fngraph.models import generate, llama, loading, lora, naming
from tests.integrations.architectures import EVERY_MODE, make
from tests.integrations.test_transformers import graphify, hold as hold_text, want
from tests.models import tiny
from tests.models.test_lora import random_adapter
from tests.traced_once import Kept, traced_once

S, B, R, T, COUNT = 4, 4, 4, 16, 2  # of a block, a request; requests, tokens; slots of adapters
LIMITS = fg.Limits(T, R, B=B)
SIZES = (2, 8)
MODES = tuple(toys.MODES)
LEVELS: dict[str, dict[str, Any]] = {
    "none": {"compile": "none"},
    "none, all passes": {"compile": "none", "passes": "all"},
    "pieces": {"compile": "pieces"},
    "once": {"compile": "once"},
    "stock": {"compile": "stock"},
}
EXACT = {"atol": 0, "rtol": 0}
CLOSE = {"cpu": {"atol": 1e-4, "rtol": 1e-4}, "cuda": {"atol": 1e-3, "rtol": 1e-3}}
STEPS: tuple[dict[int, int], ...] = (  # request to new tokens
    {0: 5, 2: 3}, {0: 1, 2: 1}, {1: 2, 0: 1, 2: 4}, {0: 1, 1: 1, 2: 1}, {3: 9}, {3: 1},
    {1: 1, 3: 1, 0: 1, 2: 1}, {2: 1, 1: 3},
)  # fmt: skip
WHOLE: tuple[dict[int, int], ...] = ({0: 5, 2: 3}, {1: 1}, {3: 2, 1: 4, 0: 1}, {2: 9}, {0: 2})


@fg.struct
class AdapterIds:
    """The slot of each token."""

    adapter_ids: Tensor = fg.buffer("T", "int64", pad=-1)


@fg.struct
class Adapted(llama.Batch, AdapterIds):
    """Llama's, with adapters."""


def adapted(params: Any, adapters: Any, cache: Any, batch: Adapted) -> Any:
    """Llama, each token with the update of its own adapter."""
    return lora.adapted(llama.forward)(params, adapters, cache, batch)


class Case(NamedTuple):
    """A family on a device.

    Attributes:
        held: what comes before the cache.
        options: of `graphify`.
        want: logits and the cache of each step, by bare `forward`.
    """

    forward: Callable[..., Any]
    held: tuple[Any, ...]
    cache: Callable[[], Any]
    batches: tuple[Any, ...]
    options: dict[str, Any]
    want: list[Any]


FAMILIES = (*tiny.GENERATIVE, "bert", "lora")


def shallow(name: str, params: Any, on_cpu: bool) -> Any:
    """A model with a layer of each kind, which is few pieces to compile. On the CPU the first
    alone, and of Qwen3-Next one of each kind without experts: Qwen3-MoE has some."""
    layers = params.layers[: 1 if on_cpu else 2]
    config = dataclasses.replace(params.config, num_layers=len(layers))
    if name == "qwen3_next":
        delta, attention = (params.layers[i] for i in ((2, 3) if on_cpu else (0, 3)))
        if on_cpu:
            attention = dataclasses.replace(attention, mlp=delta.mlp)
        layers = (delta, attention)
        config = dataclasses.replace(config, num_layers=2, attention_layers=(1,))
    return dataclasses.replace(params, layers=layers, config=config)


def case_of(name: str, folder: Path, device: Any) -> Case:
    """The tiny model of a family, with few layers, its weights side by side."""
    tiny.save("llama" if name == "lora" else name, folder)
    family = loading.family(folder)
    _, params = family.load(folder, device=device)
    params = shallow(name, params, device.type == "cpu")
    held: tuple[Any, ...] = (fg.ops.lay_side_by_side(params),)
    forward, Batch, options = family.forward, family.Batch, {}
    if name == "lora":
        adapters = lora.slots(params, count=COUNT, rank=3, names=(*lora.ATTENTION, "w_down"))
        for slot in range(COUNT):
            one = random_adapter(adapters, slot, 3)
            for own, new in zip(adapters, one):
                for path, pair in own.items():
                    pair.a[slot], pair.b[slot] = new[path].a, new[path].b
        held, forward, Batch = (*held, adapters), adapted, Adapted
        options = {"adapters": (COUNT,)}
    elif name == "bert":
        options = {"pooling": True}

    def cache() -> Any:
        made = family.init_cache(params.config, R * B, block_size=S, num_slots=R, device=device)
        for x in naming.named(made).values():
            x.fill_(torch.nan)  # so that reading what was never written shows
        return made

    batches = batches_of(Batch, device, whole=name == "bert")
    one = Case(forward, held, cache, batches, options, [])
    state = cache()
    for batch in batches:
        got, state = forward(*held, state, batch)
        one.want.append(toys.clone((got, state)))
    return one


def batches_of(Batch: Any, device: Any, whole: bool) -> tuple[Any, ...]:
    """The batch of each step; request r owns its blocks and the state of that number."""
    generator = torch.Generator().manual_seed(4)
    past, made = [0] * R, []
    for step in WHOLE if whole else STEPS:
        rows = [(r, 0 if whole else past[r], new) for r, new in step.items()]
        for r, before, new in rows:
            past[r] = before + new
        new = [n for _, _, n in rows]
        ends = torch.tensor(new).cumsum(0)
        places = [r * B * S + p + i for r, p, n in rows for i in range(n)]
        owners = torch.tensor([r for r, _, n in rows for _ in range(n)])
        leaves = {
            "token_ids": torch.randint(tiny.VOCAB, (sum(new),), generator=generator),
            "positions": torch.tensor([p + i for _, p, n in rows for i in range(n)]),
            "slot_mapping": torch.tensor(places),
            "seq_lens": torch.tensor([p + n for _, p, n in rows], dtype=torch.int32),
            "query_start_loc": torch.tensor([0, *ends.tolist()], dtype=torch.int32),
            "block_tables": torch.tensor(
                [[r * B + b for b in range(B)] for r, _, _ in rows], dtype=torch.int32
            ),
            "state_slots": torch.tensor([r for r, _, _ in rows]),
            "logits_indices": ends - 1,
            "adapter_ids": owners % (COUNT + 1) - 1,
        }
        decode = all(n == 1 and p for _, p, n in rows)
        used = len(set(leaves["adapter_ids"].tolist()) - {-1})
        spec = fg.BatchSpec(
            sum(new), len(rows), query_len=1 if decode else None,
            **({"adapters": used} if Batch is Adapted else {}),
        )  # fmt: skip
        made.append(generate.select(Batch, leaves, spec, device))
    return tuple(made)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Any], Case]:
    """`case_of`, made once."""
    kept: dict[Any, Case] = {}

    def of(name: str, device: Any) -> Case:
        if (name, device) not in kept:
            kept[name, device] = case_of(name, tmp_path_factory.mktemp(name), device)
        return kept[name, device]

    return of


@pytest.fixture(scope="module")
def traces() -> Kept:
    """Of each family at each level, for all modes."""
    return {}


def capture(case: Case, recorder: str, level: str, modes: str, **options: Any) -> Any:
    """A step, and the cache that it is bound to."""
    cache = case.cache()
    fast = fg.graphify(
        case.forward, modes=modes, donate="cache", stage="batch", sizes=SIZES, recorder=recorder,
        **case.options | LEVELS[level] | options,
    )  # fmt: skip
    return fast.bind(*case.held).capture(cache, LIMITS, progress=False), cache


def hold(case: Case, step: Any, cache: Any, steps: slice = slice(None), **tolerance: Any) -> None:
    """These steps give what bare `forward` gave, and leave the cache so."""
    for batch, expected in list(zip(case.batches, case.want))[steps]:
        got, back = step(cache, batch)
        assert back is cache
        toys.assert_trees((got, back), expected, **tolerance)


def ahead(step: Any) -> list[Any]:
    """What has been compiled for a step, or loaded."""
    return [one for piece in step.main.executable.compiled for one in piece.made]


def resolved(step: Any, modes: str) -> fg.Mode:
    """The modes after a model or its backends have had their say: an encoder's are lower."""
    for note in step.notes:
        if note.startswith(f"{modes} -> "):
            modes = note.removeprefix(f"{modes} -> ").partition(":")[0]
    return fg.Mode.parse(modes)


def every_mode(
    name: str, case: Case, level: str, recorder: str, traces: Kept, modes: tuple[str, ...] = MODES
) -> None:
    """A family at a level, in these modes: one trace, and code that is made for the first."""
    device = case.batches[0].token_ids.device
    for mode in modes:
        with traced_once(traces, (name, level, device)):
            step, cache = capture(case, recorder, level, mode)
        made = ahead(step)
        exact = (level, mode, device.type) == ("none", "NONE", "cpu")
        hold(case, step, cache, **EXACT if exact else CLOSE[device.type])
        compiled = level.partition(",")[0] != "none"
        assert step.main.executable.level == ("pieces" if compiled else "none")
        assert bool(made) == compiled and ahead(step) == made  # and nothing in a step
        runs_as = resolved(step, mode)
        ran = {ran for _, _, ran in step.stats.counts}
        assert ran == {runs_as.decode, runs_as.mixed, fg.Mode.NONE}  # one is beyond the ladder


SAMPLE = [("llama", level, MODES) for level in LEVELS] + [
    (name, level, modes)
    for name in FAMILIES[1:]
    for level, modes in (
        ("none, all passes", ("NONE", "FULL_AND_PIECEWISE")), ("pieces", ("FULL_AND_PIECEWISE",))
    )
]  # fmt: skip


@pytest.mark.sampled("qwen3-pieces", "bert-none")
@pytest.mark.parametrize(("name", "level", "modes"), SAMPLE, ids=str)
def test_a_sample_on_the_tape(name: str, level: str, modes: tuple[str, ...], cases, traces):
    every_mode(name, cases(name, torch.device("cpu")), level, "tape", traces, modes)


@pytest.mark.gpu
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_at_every_level_in_every_mode(name: str, level: str, cases, traces):
    every_mode(name, cases(name, torch.device("cuda", 0)), level, "cuda", traces)


# --- what a step goes through ---------------------------------------------------------------------

ON_A_GPU = pytest.mark.gpu
CHANGED = ("norm", "positions")  # by one piece: the last norm of a decoder; BERT has no such leaf
LIVES = [
    pytest.param(name, level, "tape" if on_cpu else "cuda", marks=[] if on_cpu else ON_A_GPU)
    for on_cpu in (True, False)
    for name in FAMILIES
    for level in LEVELS
    if not on_cpu or (name, level) in {("llama", "pieces"), ("lora", "none, all passes")}
]


@pytest.mark.sampled(0)
@pytest.mark.parametrize(("name", "level", "recorder"), LIVES)
def test_guards_sleep_and_weights_that_are_bound(name: str, level: str, recorder: str, cases):
    """Borrowed results, poisoned padding and a nap; then other weights, written where the old ones
    are; then some of another dtype, for which all is traced anew, and compiled where they are."""
    case = cases(name, torch.device("cuda", 0) if recorder == "cuda" else torch.device("cpu"))
    own = fg.ops.lay_side_by_side(toys.clone(case.held[0]))  # others bind the weights of `cases`
    case = case._replace(held=(own, *case.held[1:]))
    step, cache = capture(
        case, recorder, level, "FULL_AND_PIECEWISE", guards=True, outputs="borrow"
    )
    close, made = CLOSE[case.batches[0].token_ids.device.type], ahead(step)
    hold(case, step, cache, slice(0, 3), **close)
    step.sleep()
    step.wake()
    hold(case, step, cache, slice(3, None), **close)
    params, *rest = case.held
    kept = toys.clone(params)
    for change in (lambda x: x * 1.5, torch.Tensor.bfloat16):
        other = naming.replaced(kept, lambda n, x, to=change: to(x) if n in CHANGED else x)
        step.rebind(params=other)
        for batch in case.batches[:2]:
            expected = case.forward(other, *rest, toys.clone(cache), batch)
            toys.assert_trees(step(cache, batch), expected, **close)
        if change is not torch.Tensor.bfloat16:
            assert ahead(step) == made  # of the same kind: nothing is compiled for them
    assert bool(made) == any(one not in made for one in ahead(step))
    assert not made or any(one in made for one in ahead(step))  # pieces that do not read them


# --- models of transformers -----------------------------------------------------------------------

THEIRS = [pytest.param("Llama", "none, all passes", MODES[-1:], "cpu", 1)] + [
    pytest.param(name, level, MODES if name == "Llama" else MODES[-1:], "cuda", 2, marks=ON_A_GPU)
    for name in EVERY_MODE
    for level in LEVELS
]


@pytest.mark.parametrize(("name", "level", "modes", "place", "layers"), THEIRS)
def test_a_model_of_transformers_says_what_it_says_itself(
    name: str, level: str, modes: tuple[str, ...], place: str, layers: int, traces
):
    right = want(make(name, device=place, num_hidden_layers=layers))
    for mode in modes:
        with traced_once(traces, (name, level, place)):
            fast = graphify(right.model, modes=mode, **LEVELS[level])
        hold_text(fast, right, mode, atol=CLOSE[place]["atol"])
        assert bool(ahead(fast.step)) == (level.partition(",")[0] != "none")
