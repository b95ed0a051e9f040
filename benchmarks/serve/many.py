"""Several tokens a request from one launch, beside single steps (`benchmarks serve --many 128`).

launches   fixed batches: N tokens a request in one launch and in N FULL steps, which read what the
           launch has drawn; a launch that is done after 10 of N; and one right behind another,
           which the host, that has not slept meanwhile, makes in less; and its graph's replay alone
streams    a few requests at a time through the loop, with and without `Policy(decode_many=N)`; who
           comes ends the launch that runs. With --drafts 3 both verify drafts, on the host's word
           or on the device. `same` is the share of texts that are equal. In bf16 a text also goes
           by which others are in its steps, and by when they come: where two part, the tokens there
           are held to bare `forward` (right.py), and `right` has those that are as good too
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

import fngraph as fg
from benchmarks.harness import Mistake
from benchmarks.serve.right import RIGHT, LogitsAfter, refill, share_of_texts
from benchmarks.serve.streams import served
from benchmarks.traffic import Arrival
from benchmarks.workload import to_device
from fngraph.models.serving.batches import batch_type, empty_batch, lay_out
from fngraph.models.serving.policy import Policy
from fngraph.models.serving.requests import Job, Request, Row
from fngraph.models.serving.steps import Steps
from fngraph.models.serving.texts.tokens import Tokens

ROUNDS = 5
EARLY = 10  # tokens after which a launch is done
WAVES, APART_S = 4, 0.02  # of a stream: requests at a time, one after the other
HOST_US, PER_STEP, AT_END = 40.0, 1.01, 1.1  # what is asked of a launch of 128 at batch 1
AHEAD, LATE = 1.1, 1.1  # of a stream: times the tokens a second, times the wait for the first


def batch_of(
    num_reqs: int, context: int, policy: Policy, device: Any, vocab_size: int,
    drawn: Sequence[Sequence[int]] = (), left: int = 1,
) -> Any:  # fmt: skip
    """Greedy requests of `context` tokens and what they have drawn since, that may draw `left`."""
    total = context + policy.decode_many
    per = -(-total // policy.block_size)
    rows = []
    for i in range(num_reqs):
        prompt = ((i + 7 * j) % vocab_size for j in range(context))
        tokens = Tokens((*prompt, *(drawn[i] if drawn else ())))
        request = Request(i, (1,), len(tokens) - 1 + left)
        blocks = Tokens(tuple(range(i * per, (i + 1) * per)))
        rows.append(Row(Job(request, tokens, len(tokens) - 1, blocks, -1), 1))
    kind = batch_type(*["many"] * (left > 1))
    made = lay_out(rows, policy, lambda spec: empty_batch(kind, policy, spec), turns=left)
    return to_device(made, device)


def spans(run: Callable[[], Any], device: str) -> tuple[float, float, float, Any]:
    """us of the host until `run` returns, ms on the device, ms until its tokens are on the host;
    and what it gave. On a CPU all is the host's."""
    if device == "cuda":
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
    began = time.perf_counter()
    ids = run()
    host = time.perf_counter() - began
    if device == "cuda":
        end.record()
    ids = ids.tolist()
    wall = (time.perf_counter() - began) * 1e3
    return host * 1e6, begin.elapsed_time(end) if device == "cuda" else wall, wall, ids


def behind_another(run: Callable[[], Any]) -> float:
    """us of the host for the second of two launches, whose first still runs."""
    run()
    began = time.perf_counter()
    ids = run()
    host = time.perf_counter() - began
    ids.tolist()
    return host * 1e6


def replay_alone(steps: Steps, batch: Any, device: str) -> float:
    """us of the host for a launch's graph and nothing around it; it reads a batch that is in the
    ring of these launches still."""
    counts = batch.spec[fg.core.spec.COUNTS]
    keys = next(one.main for one in steps.captured if counts in one.main.prepared)
    ((replay, _),) = keys.prepared[counts].calls
    began = time.perf_counter()
    replay()
    host = time.perf_counter() - began
    if device == "cuda":
        torch.cuda.synchronize()
    keys.ring.resume()  # it was no step
    return host * 1e6


@torch.no_grad()
def launches(
    steps: Steps, cache: Any, policy: Policy, sizes: Sequence[int], context: int,
    vocab_size: int, device: str,
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each number of requests.

    Raises:
        Mistake: a cache with too few blocks.
    """
    turns = policy.decode_many
    rows = []
    for n in sizes:
        blocks = n * -(-(context + turns) // policy.block_size)
        if steps.can and steps.can.num_blocks is not None and blocks > steps.can.num_blocks:
            raise Mistake(f"--many {turns} at batch {n} takes --blocks {blocks} or more")
        at = (n, context, policy, device, vocab_size)
        whole, early = (batch_of(*at, left=left) for left in (turns, min(EARLY, turns)))

        def launch(batch: Any = whole) -> Any:
            return steps.run(cache, batch)[0]

        refill(cache)
        drawn = launch().tolist()
        single = [batch_of(*at, [text[:j] for text in drawn]) for j in range(turns)]

        def one_by_one(waiting: bool, single: Sequence[Any] = single) -> Any:
            for batch in single:
                ids = steps.run(cache, batch)[0]
                if waiting:
                    ids.tolist()
            return ids

        refill(cache)
        again = [steps.run(cache, batch)[0].flatten().tolist() for batch in single]
        same = sum(text == list(other) for text, other in zip(drawn, zip(*again))) / n
        took: dict[str, list[Any]] = {"launch": [], "early": [], "steps": [], "loop": []}
        for _ in range(ROUNDS):
            took["launch"].append(spans(launch, device))
            took["early"].append(spans(functools.partial(launch, early), device))
            took["steps"].append(spans(lambda: one_by_one(False), device))
            took["loop"].append(spans(lambda: one_by_one(True), device))
        behind = median(behind_another(launch) for _ in range(ROUNDS))
        alone = median(replay_alone(steps, whole, device) for _ in range(ROUNDS))
        host, on_device, wall = (
            {name: median(one[i] for one in took[name]) for name in took} for i in range(3)
        )
        step = on_device["steps"] / turns
        rows.append({
            "batch": n, "tokens": turns, "same": same, "host us a launch": host["launch"],
            "host us behind another": behind, "host us of its replay": alone,
            "host us of the steps": host["steps"],
            "ms a token": wall["launch"] / turns,
            "a step, device ms": step, "of a step": wall["launch"] / turns / step,
            "launch, device ms": on_device["launch"], "loop, ms a token": wall["loop"] / turns,
            f"of {EARLY} steps": on_device["early"] / (step * min(EARLY, turns)),
        })  # fmt: skip
    return rows


def stream_of(num_reqs: int, new: int, vocab_size: int) -> list[Arrival]:
    """Waves of so many requests, each soon after the one before it."""
    arrivals = []
    for wave in range(WAVES):
        for i in range(num_reqs):
            prompt = tuple((3 + wave + 11 * i + 7 * j) % vocab_size for j in range(16))
            arrivals.append(Arrival(1e3 * wave + APART_S * i, prompt, new))
    return arrivals


def few_at_a_time(
    steps: Steps, cache: Any, policy: Policy, num_blocks: int, sizes: Sequence[int], new: int,
    vocab_size: int, logits_after: LogitsAfter,
) -> list[dict[str, Any]]:  # fmt: skip
    """Two rows for each number of requests: a token a launch, and as many as the policy says."""
    rows = []
    for n in sizes:
        arrivals = stream_of(n, new, vocab_size)
        texts = []
        for k in (1, policy.decode_many):
            sizes_of = policy.max_tokens, n, policy.max_blocks, policy.block_size
            own = Policy(*sizes_of, query_lens=policy.query_lens, decode_many=k)
            for _ in range(2):  # the first one warms up
                row, _, got = served(steps, cache, own, num_blocks, arrivals)
            texts.append(got)
            drafts = max(policy.query_lens) - 1
            rows.append({"at a time": n, "decode_many": k, "drafts": drafts, **row})
        same = sum(texts[0][i] == texts[1][i] for i in texts[0]) / len(texts[0])
        right = share_of_texts(texts[1], texts[0], arrivals, logits_after)
        for row in rows[-2:]:
            row |= {"same": same, "right": right}
    return rows


def missed_by(found: dict[str, Any]) -> list[str]:
    """What is asked of a GPU and was not met, a line each."""
    lines = []
    for row in found.get("launches", ()):
        at = f"{row['tokens']} tokens at batch {row['batch']}"
        if row["same"] < 1:
            lines.append(f"{at}: {row['same']:.2f} of the texts are those of single steps")
        if row["batch"] > 1 or row["tokens"] < 128:
            continue
        if row["host us a launch"] > HOST_US:
            lines.append(f"{at}: a launch costs the host {row['host us a launch']:.0f} us")
        if row["of a step"] > PER_STEP:
            lines.append(f"{at}: a token takes {row['of a step']:.3f} of a step")
        if row[f"of {EARLY} steps"] > AT_END:
            lines.append(
                f"{at}: done after {EARLY} it takes {row[f'of {EARLY} steps']:.2f} of them"
            )
    one = {row["at a time"]: row for row in found.get("streams", ()) if row["decode_many"] == 1}
    for row in found.get("streams", ()):
        if row["decode_many"] == 1:
            continue
        at, single = f"{row['at a time']} at a time", one[row["at a time"]]
        times = row["tokens/s"] / single["tokens/s"]
        late = row["first token p50 ms"] / single["first token p50 ms"]
        if row["right"] < RIGHT:
            lines.append(
                f"{at}: {row['right']:.2f} of the texts are as good as those of single steps"
            )
        if times < AHEAD:
            lines.append(f"{at}: {times:.2f} times the tokens a second, and {AHEAD} is asked")
        if late > LATE:
            lines.append(f"{at}: the first token comes {late:.2f} times as late")
    return lines
