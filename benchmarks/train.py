"""A step of training, captured, beside the plain loop of torch: python -m benchmarks train

The model that the repository ships, and one of GPT-2's sizes with Llama's layers (124M); eight
sequences a step; layers in bfloat16 over float32 masters, clipping, AdamW. Every way does the same
steps first, and ends as near to where float32 ends as the plain loop does, or nothing is measured:
AdamW's first steps go by signs, so that rounding which differs takes two ways of bfloat16 apart.

    plain            autograd and `torch.optim.AdamW`, fused on a GPU; eager
    bare             `train_step` as a function, eager
    plain, captured  the plain loop's step in one CUDA graph by hand
    plain, MODE      the same with its loss under `torch.compile` in this mode (--by-hand)
    FULL, LEVEL      `fg.graphify(train_step, modes="FULL", compile=LEVEL)`

`ms` is wall time of a step with its device work finished. `peak MB` is what torch has allocated at
most, capture included, beyond what there was before; `reserved MB` what it has taken from the
device.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fngraph as fg
from benchmarks.device import release
from benchmarks.harness import DEVICE, Benchmark, count, kept, show, some_of
from benchmarks.steps import median_ms
from fngraph.models.families import llama
from fngraph.models.train import DTYPES, tiny_bytes
from fngraph.models.training.adamw import AdamW, constant, init
from fngraph.models.training.flat import Flat, packed, unpacked
from fngraph.models.training.step import make_train_step
from fngraph.models.training.texts import make_loss, nats_a_token
from fngraph.models.weights import naming

SHAPES = {
    "shipped": (tiny_bytes(), 512),
    "124M": (
        llama.Config(
            vocab_size=50304, num_layers=12, num_heads=12, num_kv_heads=12, head_dim=64, dim=768,
            mlp_dim=2048, tied=True,
        ),
        1024,
    ),
    "tiny": (
        llama.Config(
            vocab_size=256, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, dim=64,
            mlp_dim=128, tied=True,
        ),
        32,
    ),
}  # fmt: skip
LEVELS = ("none", "pieces")
HANDS = ("captured", "default", "max-autotune-no-cudagraphs")
SETTINGS = AdamW(decays=Flat(True, False))
LR = {"shipped": 1e-3, "124M": 3e-4, "tiny": 1e-3}
STEPS = 10  # that are compared
LOSS_OFF = {"float32": 1e-4, "bfloat16": 1e-2}  # of a step on the mean, as a share of it
WAY_OFF = {"float32": 1e-2, "bfloat16": 0.1}  # of all weights, as a share of the way they went
AS_PLAIN = 2  # times as far from float32 as the plain loop, which may be beyond these
AHEAD_OF_HAND, AHEAD_OF_EAGER, MEMORY = 1.0, 2.0, 1.05
MB = 1e6


class Way(NamedTuple):
    """A step that goes on from where the last one ended.

    Attributes:
        step: of tokens (N, S + 1), on the device; its loss.
        weights: by name, as they are now.
    """

    step: Callable[[Tensor], Tensor]
    weights: Callable[[], dict[str, Tensor]]


class Case(NamedTuple):
    """What is trained, from which weights."""

    config: llama.Config
    named: dict[str, Tensor]
    dtype: torch.dtype
    batches: list[Tensor]  # `STEPS` of them
    lr: float


def plain_way(case: Case, how: str | None = None) -> Way:
    """The plain loop. `how`: None: eager; "captured"; a mode of `torch.compile`, captured too."""
    named = {name: w.clone().requires_grad_() for name, w in case.named.items()}
    cuda = next(iter(named.values())).is_cuda
    params = naming.filled(llama.blank(case.config), named)
    groups = [
        {
            "params": [w for w in named.values() if w.ndim > 1],
            "weight_decay": SETTINGS.weight_decay,
        },
        {"params": [w for w in named.values() if w.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, lr=case.lr, betas=SETTINGS.betas, fused=cuda, capturable=cuda and how is not None
    )

    def loss_of(params: Any, tokens: Tensor) -> Tensor:
        return nats_a_token(naming.replaced(params, lambda _, w: w.to(case.dtype)), tokens)

    fn: Any = loss_of
    if how not in (None, "captured"):
        torch.compiler.reset()
        fn = torch.compile(loss_of, mode=how, fullgraph=True, dynamic=False)

    def step(tokens: Tensor) -> Tensor:
        with torch.enable_grad():
            loss = fn(params, tokens)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(named.values(), SETTINGS.clip or 0.0)
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()  # type: ignore[no-any-return]

    def weights() -> dict[str, Tensor]:
        return {name: w.detach() for name, w in named.items()}

    if how is None:
        return Way(step, weights)
    tokens = case.batches[0].clone()
    replay = by_hand(step, tokens)
    for name, w in named.items():
        w.detach().copy_(case.named[name])
    for state in optimizer.state.values():
        for x in state.values():
            x.zero_()
    return Way(replay, weights)


def by_hand(step: Callable[[Tensor], Tensor], tokens: Tensor) -> Callable[[Tensor], Tensor]:
    """A step in one CUDA graph that reads `tokens`."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(tokens)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(tokens)

    def replay(new: Tensor) -> Tensor:
        tokens.copy_(new)
        graph.replay()
        return loss

    return replay


def our_way(case: Case, level: str | None, *, checkpoint: bool = False) -> Way:
    """`train_step`; at a level as one graph, else as it is."""
    blank = llama.blank(case.config)
    loss = make_loss(case.config, dtype=case.dtype, checkpoint=checkpoint)
    fn: Any = make_train_step(loss, SETTINGS, constant(case.lr))
    if level is not None:
        fn = fg.graphify(fn, modes="FULL", compile=level, donate=("params", "opt"), stage="batch")
    state: list[Any] = [params := packed(case.named), init(params)]

    def step(tokens: Tensor) -> Tensor:
        *state[:], metrics = fn(*state, tokens)
        return metrics["loss"]  # type: ignore[no-any-return]

    return Way(step, lambda: naming.named(unpacked(blank, state[0])))


def ways(flags: argparse.Namespace, case: Case) -> Iterator[tuple[str, Callable[[], Way]]]:
    """Each way by name, not made yet; the first is what the others are compared with."""
    yield "plain", functools.partial(plain_way, case)
    yield "bare", functools.partial(our_way, case, None)
    for how in flags.by_hand if flags.device.startswith("cuda") else ():
        yield f"plain, {how}", functools.partial(plain_way, case, how)
    for level in flags.levels:
        yield f"FULL, {level}", functools.partial(our_way, case, level)
        if flags.checkpoint:
            yield (
                f"FULL, {level}, checkpoint",
                functools.partial(our_way, case, level, checkpoint=True),
            )


def of_model(flags: argparse.Namespace, name: str) -> Iterator[dict[str, Any]]:
    """A row a way."""
    config, context = SHAPES[name]
    context, dtype = flags.context or context, DTYPES[flags.dtype]
    named = naming.named(llama.init_params(config, device=flags.device))
    batches = texts(config, flags.batch, context, flags.device)
    case = Case(config, named, dtype, batches, LR[name])
    reference = ends_of(case, plain_way(case._replace(dtype=torch.float32)))
    may: tuple[float, ...] = (LOSS_OFF[flags.dtype], WAY_OFF[flags.dtype])
    for label, make in ways(flags, case):
        with Memory(flags.device) as memory:
            way = make()
            off = apart(case, ends_of(case, way), reference)
            if label == "plain":
                may = tuple(max(most, AS_PLAIN * own) for most, own in zip(may, off))
            if not all(own < most for own, most in zip(off, may)):
                raise SystemExit(
                    f"{name}, {label} is wrong: losses are {off[0]:.3g} from those of float32, "
                    f"where {may[0]:.3g} is allowed, weights {off[1]:.3g} of their way, where "
                    f"{may[1]:.3g} is"
                )
            ms = median_ms(functools.partial(way.step, batches[0]), flags.repeats)
            del way
        yield {
            "model": name, "way": label, "batch": f"{flags.batch} x {context}", "ms": ms,
            "tokens a s": flags.batch * context / ms * 1e3, "peak MB": memory.peak,
            "reserved MB": memory.reserved, "loss off": off[0], "weights off": off[1],
        }  # fmt: skip


def ends_of(case: Case, way: Way) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of the steps that are compared, and the weights behind them."""
    losses = [way.step(tokens).item() for tokens in case.batches]
    return losses, {name: w.to("cpu", copy=True) for name, w in way.weights().items()}


def texts(config: llama.Config, batch: int, context: int, device: str) -> list[Tensor]:
    """Batches of a text that can be learned: (N, S + 1) each."""
    generator = torch.Generator().manual_seed(0)
    begins = torch.randint(config.vocab_size, (STEPS, batch, 1), generator=generator)
    tokens = (begins + 3 * torch.arange(context + 1)) % min(config.vocab_size, 1000)
    return list(tokens.to(device))


def apart(case: Case, got: Any, want: Any) -> tuple[float, float]:
    """How far two runs are apart: losses, as shares on the mean, and weights, of their way."""
    (losses, weights), (wanted, others) = got, want
    loss_off = sum(abs(a - b) / b for a, b in zip(losses, wanted)) / len(wanted)
    off = way = 0.0
    for name, w in weights.items():
        off += float((w - others[name]).double().square().sum())
        way += float((others[name] - case.named[name].cpu()).double().square().sum())
    return loss_off, (off / way) ** 0.5


class Memory:
    """MB that torch has allocated and taken at most, beyond what there was; None on a CPU."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.peak: float | None = None
        self.reserved: float | None = None

    def __enter__(self) -> Memory:
        release(self.device)
        if self.device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.device.startswith("cuda"):
            self.peak = (torch.cuda.max_memory_allocated() - self.before[0]) / MB
            self.reserved = (torch.cuda.max_memory_reserved() - self.before[1]) / MB


def missed(rows: list[dict[str, Any]], flags: argparse.Namespace) -> list[str]:
    """Where the best graph is behind the best by hand, not twice eager, or takes more memory."""
    lines = []
    for model in dict.fromkeys(row["model"] for row in rows):
        here = {row["way"]: row for row in rows if row["model"] == model}
        ours = [row for way, row in here.items() if way.startswith("FULL") and "check" not in way]
        hands = [row["ms"] for way, row in here.items() if way.startswith("plain, ")]
        if not (ours and hands):
            continue
        best = min(ours, key=lambda row: row["ms"])
        eager = here["plain"]
        asked = [
            ("by hand", min(hands) / best["ms"], AHEAD_OF_HAND),
            ("eager", eager["ms"] / best["ms"], AHEAD_OF_EAGER if model == "shipped" else 1.0),
        ]
        lines += [
            f"{model}: {best['way']} is {ratio:.2f} times as fast as {what}, {least} is asked"
            for what, ratio, least in asked
            if ratio < least
        ]
        if best["peak MB"] > MEMORY * eager["peak MB"]:
            lines.append(
                f"{model}: {best['way']} takes {best['peak MB']:.0f} MB, eager "
                f"{eager['peak MB']:.0f}, and at most {MEMORY} times that is asked"
            )
    return lines


@Benchmark(
    {
        **DEVICE,
        "--models": some_of(list(SHAPES), ("shipped", "124M")),
        "--batch": count(8, "sequences a step"),
        "--context": count(0, "tokens a sequence; 0: the model's own", least=0),
        "--dtype": {"choices": list(DTYPES), "default": "bfloat16"},
        "--levels": some_of(LEVELS), "--by-hand": some_of(HANDS, HANDS[:2]),
        "--checkpoint": {"action": "store_true", "help": "each level with layers made again too"},
        "--repeats": count(50),
    },
    quick={"models": ["tiny"], "repeats": 2, "dtype": "float32"}, missed=missed,
)  # fmt: skip
@torch.no_grad()
def measure(flags: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of each model."""
    rows = kept(flags, of_models(flags))
    show(rows)
    return rows


def of_models(flags: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Of all of them, each told in a line."""
    for name in flags.models:
        for row in of_model(flags, name):
            print({k: row[k] for k in ("model", "way", "ms", "peak MB")}, flush=True)
            yield row
