"""Serving in every mode, with random weights in bf16: python -m benchmarks serve

decode     fixed batches, in turns with bare `forward`; see turns.py
traffic    a stream of benchmarks/traffic.py through models/serving/loop.py: tokens a second, time
           to first token, time between tokens, what ran as what, padding; see streams.py. With
           --beside the same through transformers' continuous batching; see beside.py
--many 128 128 tokens a request in one launch, beside 128 single steps, and no other part; many.py

All hold what is drawn to bare `forward`; see right.py. --tiny: small enough for the tape, on a
CPU. Both models and all modes take some minutes on a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import torch

import fngraph as fg
from benchmarks.device import release
from benchmarks.harness import (
    BACKEND,
    DEVICE,
    MODES,
    Benchmark,
    Mistake,
    count,
    factor,
    show,
    some_of,
    write,
)
from benchmarks.serve.beside import by_transformers
from benchmarks.serve.many import few_at_a_time, launches, missed_by
from benchmarks.serve.right import share_of_texts, wrong
from benchmarks.serve.streams import served, shares
from benchmarks.serve.turns import broken, by_batch, decode_batch, in_turns, on_device
from benchmarks.traffic import PROFILES, STREAM, Arrival, Lengths, Profile, as_text, stream
from benchmarks.workload import SHAPES, attention_of, random_params
from fngraph.models.families import llama, lora
from fngraph.models.serving.policy import Policy
from fngraph.models.serving.requests import Job, Request, Row
from fngraph.models.serving.steps import Steps, bare_steps, make_steps
from fngraph.models.serving.texts.tokens import Tokens

PARTS = ("decode", "traffic")
LEVELS: dict[str, dict[str, Any]] = {
    "none": {}, "fused": {"passes": "all"}, "pieces": {"compile": "pieces"}
}  # fmt: skip
AHEAD = 1.5  # times transformers' tokens a second
SIZES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 96, 128, 192, 256, 384, 512)
TINY = Profile(200, Lengths(9, 0.5, 24), Lengths(6, 0.5, 12), burst=3, systems=(8,))


@dataclasses.dataclass(frozen=True)
class Bench:
    """A model with its cache, and what is measured on it.

    Attributes:
        adapters: slots, or None.
    """

    args: argparse.Namespace
    config: llama.Config
    params: Any
    cache: Any
    policy: Policy
    num_blocks: int
    adapters: Any

    @property
    def more(self) -> tuple[str, ...]:
        """What batches have beside the paged fields."""
        return ("sampling",) * self.args.sampled

    def steps(self, modes: str) -> Steps:
        """Captured."""
        return make_steps(
            llama.forward, self.params, self.cache, self.policy, *self.more, modes=modes,
            sizes=tuple(size for size in SIZES if size <= self.policy.max_tokens),
            backends={"attention": self.args.backend}, outputs="borrow", adapters=self.adapters,
            **LEVELS[self.args.level],
        )  # fmt: skip

    def bare(self) -> Steps:
        """`forward` and the draw, called: it runs the attention that suits the device."""
        return bare_steps(
            llama.forward, self.params, self.policy, *self.more, adapters=self.adapters,
            device=self.args.device,
        )  # fmt: skip

    def logits(self, cache: Any, batch: Any) -> torch.Tensor:
        """(R, Q, V), of `forward` alone."""
        if batch.spec.adapters:
            return lora.adapted(llama.forward)(self.params, self.adapters, cache, batch)[0]
        return llama.forward(self.params, cache, batch)[0]

    @torch.no_grad()
    def logits_after(self, one: Arrival, text: Sequence[int]) -> torch.Tensor:
        """(V,), of what follows the text that a request has so far."""
        tokens = Tokens((*one.prompt, *text))
        blocks = Tokens(tuple(range(self.policy.max_blocks)))
        request = Request(0, one.prompt, one.max_new, adapter=one.adapter)
        row = Row(Job(request, tokens, 0, blocks, -1), len(tokens))
        names = ("adapters",) * (one.adapter >= 0)
        batch = on_device([row], self.policy, self.args.device, *names)
        return self.logits(self.cache, batch)[0, 0]


def make_bench(name: str, args: argparse.Namespace, profile: Profile) -> Bench:
    """One model, with room for the batches of both parts."""
    config, block_size, most = SHAPES[name], 16, max(args.batches)
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    B = -(-max(profile.longest, args.context + 1) // block_size)
    decoding = most * -(-args.context // block_size)
    num_blocks = args.blocks or max(B, most * (B // 2), decoding)
    least = max(decoding * ("decode" in args.parts), B * ("traffic" in args.parts))
    if num_blocks < least:
        raise Mistake(f"--blocks {num_blocks}: {least} or more")
    if args.beside and (args.sampled or args.adapters):
        raise Mistake(
            "--beside: what both draw is held to each other, so neither --sampled nor --adapters"
        )
    torch.manual_seed(args.seed)
    params = fg.ops.lay_side_by_side(random_params(config, args.device, dtype))
    cache = llama.init_cache(
        config, num_blocks, block_size=block_size, device=args.device, dtype=dtype
    )
    adapters = lora.slots(params, count=args.adapters, rank=16) if args.adapters else None
    for pair in (pair for layer in adapters or () for pair in layer.values()):
        pair.a.normal_(std=pair.a.shape[2] ** -0.5)
        pair.b.normal_(std=pair.b.shape[1] ** -0.5)  # changes by about 1 what is about 1
    policy = Policy(args.max_tokens, most, B, block_size)
    return Bench(args, config, params, cache, policy, num_blocks, adapters)


def several(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One model with several tokens a launch; printed on the way.

    Raises:
        Mistake: what such launches do not do.
    """
    if args.sampled or args.adapters:
        raise Mistake("--many: its requests are greedy, so neither --sampled nor --adapters")
    found: dict[str, Any] = {
        "model": name, "decode": [], "traffic": [], "launches": [], "streams": []
    }  # fmt: skip
    bench = make_bench(name, args, TINY if args.quick else PROFILES[args.profile])
    sizes = [n for n in args.batches if n <= 8]
    vocab_size, new = bench.config.vocab_size, 12 if args.quick else 128
    for turns in args.many:
        plain = dataclasses.replace(bench.policy, decode_many=turns, share=False)
        policy = dataclasses.replace(
            plain, query_lens=(1, 1 + args.drafts)[: 1 + (args.drafts > 0)]
        )
        print(f"{name}: capturing {turns} tokens a launch", flush=True)
        steps = dataclasses.replace(bench, policy=policy).steps("FULL_AND_PIECEWISE")
        held = steps, bench.cache, policy
        found["launches"] += launches(
            *held[:2], plain, sizes, args.context, vocab_size, args.device
        )
        found["streams"] += few_at_a_time(
            *held, bench.num_blocks, sizes, new, vocab_size, bench.logits_after
        )
        del steps, held
        release(args.device)
    show(found["launches"])
    show(found["streams"])
    return found


def serving(name: str, args: argparse.Namespace, done: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All that is asked for of one model; printed on the way.

    Args:
        done: of the models before it.
    """
    profile = dataclasses.replace(
        TINY if args.quick else PROFILES[args.profile], adapters=args.adapters, adapted=0.5,
        sampled=float(args.sampled),
    )  # fmt: skip
    profile = dataclasses.replace(profile, rate=profile.rate * args.speed)
    bench = make_bench(name, args, profile)
    vocab_size = bench.config.vocab_size
    captured = {}
    for mode in args.modes:
        began = time.perf_counter()
        print(f"{name} {mode}: capturing", flush=True)
        captured[mode] = bench.steps(mode)
        functions, took = captured[mode].captured, time.perf_counter() - began
        ran = attention_of(functions[0])
        keys = sum(map(len, functions))
        print(f"{name} {mode}: {keys} keys with {ran} captured in {took:.1f} s", flush=True)
    found: dict[str, Any] = {
        "model": name, "attention": ran, "decode": [], "traffic": [], "shares": []
    }  # fmt: skip
    if "traffic" in args.parts:
        arrivals = stream(profile, args.requests, vocab_size=vocab_size, seed=args.seed)
        print(as_text(arrivals))
        held = bench.cache, bench.policy, bench.num_blocks
        texts = {}
        for mode, steps in captured.items():
            print(f"{name} {mode}: serving {len(arrivals)} requests", flush=True)
            row, tally, texts[mode] = served(steps, *held, arrivals)
            found["traffic"].append({"modes": mode, **row})
            found["shares"] += [{"modes": mode, **line} for line in shares(tally)]
        _, _, wanted = served(bench.bare(), *held, arrivals)  # last, or its kernels were ready
        before = stream(profile, args.requests, vocab_size=vocab_size, seed=args.seed + 1)
        for level in args.beside:
            write(args, [*done, found], unfinished=True)
            way = f"generate_batch, level {level}"
            print(f"{name} {way}: serving {len(arrivals)} requests", flush=True)
            room = bench.num_blocks * bench.policy.block_size
            row, texts[way] = by_transformers(bench.params, arrivals, before, room, level)
            found["traffic"].append({"modes": way, **row})
            release(args.device)
        for row in found["traffic"]:
            text = texts[row["modes"]]
            row["right"] = share_of_texts(text, wanted, arrivals, bench.logits_after)
        show(found["shares"])
        show(found["traffic"])
    if "decode" in args.parts:
        device = args.device
        batches = [
            decode_batch(
                n, args.context, bench.policy, device, *bench.more, vocab_size=vocab_size,
                adapters=args.adapters,
            )
            for n in args.batches
        ]  # fmt: skip
        ways = {"bare forward": bench.bare().run} | {m: s.run for m, s in captured.items()}
        found["decode"] = in_turns(ways, bench.cache, batches, bench.logits)
        show(by_batch(found["decode"]))
    return found


def missed(found: list[dict[str, Any]], args: argparse.Namespace) -> list[str]:
    """What is drawn and wrong, and what is asked of a GPU and not met."""
    lines = [f"{one['model']}, {line}" for one in found for line in wrong(one)]
    if args.device == "cuda":
        lines += [f"{one['model']}, {line}" for one in found for line in missed_by(one)]
        lines += [f"{one['model']}, {line}" for one in found for line in broken(one["decode"])]
        lines += [
            f"{one['model']}, {row['modes']}: {row['kernels compiled']} kernels in traffic"
            for one in found for row in one["traffic"] if row.get("kernels compiled")
        ]  # fmt: skip
        lines += [f"{one['model']}, {line}" for one in found for line in slower(one["traffic"])]
    return lines


def slower(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Where the best of our modes is less than AHEAD times as fast as transformers, or the first
    token comes later."""
    ours = [row for row in rows if row["modes"] in MODES]
    theirs = [row for row in rows if row["modes"] not in MODES]
    if not ours or not theirs:
        return []
    best = max(ours, key=lambda row: row["tokens/s"])
    lines = []
    for row in theirs:
        times = best["tokens/s"] / row["tokens/s"]
        if times < AHEAD:
            lines.append(f"{best['modes']}: {times:.2f} times {row['modes']}, and {AHEAD} is asked")
        first, its = best["first token p50 ms"], row["first token p50 ms"]
        if first > its:
            late = f"{best['modes']}: first token after {first:.1f} ms"
            lines.append(f"{late}, {row['modes']}: {its:.1f}")
    return lines


FLAGS = {
    "--models": some_of(list(SHAPES), ["1B", "8B"]),
    "--modes": some_of(MODES),
    "--parts": some_of(PARTS),
    "--batches": count([1, 2, 4, 8, 16, 32, 64]),
    "--context": count(512, "tokens of each request, decode"),
    "--max-tokens": count(512, "token budget of a step"),
    "--blocks": count(0, "of the cache; 0: by the profile", least=0),
    "--requests": count(100),
    "--speed": factor(1.0, "times the profile's rate"),
    "--sampled": {"action": "store_true", "help": "draw by temperature and top-p"},
    "--adapters": count(0, "LoRA, used by half of the requests", least=0),
    "--many": {
        **count([], "tokens a request in one launch, in place of the parts", least=2),
        "nargs": "*",
    },
    "--drafts": count(
        0, "tokens that each step of its streams guesses by prompt lookup, with --many", least=0
    ),
    "--level": {
        "choices": [*LEVELS],
        "default": "none",
        "help": "passes or compilation of what is captured",
    },
    "--beside": {
        "type": int,
        "nargs": "*",
        "default": [],
        "choices": range(4),
        "metavar": "LEVEL",
        "help": "transformers' generate_batch too, at these levels of its compilation",
    },
}


@Benchmark(
    DEVICE | STREAM | FLAGS | BACKEND, missed=missed,
    quick={"device": "cpu", "models": ["tiny"], "batches": [1, 3], "context": 20,
           "max_tokens": 16, "requests": 12},
)  # fmt: skip
def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Each model, kept as it is done."""
    found: list[dict[str, Any]] = []
    for name in args.models:
        found.append(several(name, args) if args.many else serving(name, args, found))
        write(args, found, unfinished=True)
    return found
