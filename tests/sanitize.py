"""A short mixed run for compute-sanitizer: every mode, every kind of batch, keys that come and go,
and loops on the device.

    compute-sanitizer --tool memcheck  --report-api-errors no python tests/sanitize.py
    compute-sanitizer --tool racecheck python tests/sanitize.py

cuda.bindings asks the driver for functions that only later ones have, each of which counts as an
error of the API. Each step is compared with bare `forward`. Without CUDA it runs on the tape.
"""

from __future__ import annotations

from typing import Any

import torch
import toys

import fngraph as fg

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
LIMITS = fg.Limits(max_tokens=10, max_reqs=3, B=toys.B)
SIZES = (1, 2, 4, 8)
CLOSE = {"atol": 1e-4, "rtol": 1e-4}
LIKES = (  # FULL, PIECEWISE, NONE under FULL_AND_PIECEWISE
    toys.decode(1), toys.decode(3, past=5), toys.batch(3, 2, seed=1), toys.batch(8, seed=2),
    toys.batch(6, 4, seed=3),
)  # fmt: skip


def check(step: Any, params: Any, cache: Any, like: toys.Batch, kind: str) -> None:
    """One step, its rows and the cache after it."""
    want, after = toys.bare(toys.attend, params, cache, toys.on(like, DEVICE))
    batch = toys.on(like, DEVICE) if kind == "device" else like
    if kind == "host_batch":
        batch = toys.fill(step.host_batch(like.spec), like)
    got, back = step(cache, batch)
    assert back is cache
    toys.assert_trees((got, cache), (want, after), **CLOSE)


def serve(step: Any, params: Any, cache: Any) -> None:
    """Every batch in every way."""
    for like in LIKES:
        for kind in ("host_batch", "host", "device"):
            check(step, params, cache, like, kind)


def turns(params: Any, cache: Any, batch: toys.Batch) -> Any:
    """`toys.attend` two or three times, as `batch` says, then a scan over numbers:
    WHILE nodes and an IF in one of them."""
    odd = batch.seq_lens[0] % 2 == 1

    def turn(carry: Any) -> Any:
        at, total, cache = carry
        rows, cache = toys.attend(params, cache, batch)
        more = fg.cond(odd, lambda x: x * 0.5, lambda x: x + 1.0, rows)
        return at + 1, total + more, cache

    rows, cache = toys.attend(params, cache, batch)
    zero = torch.zeros_like(batch.seq_lens[0])
    carry = zero, torch.zeros_like(rows), cache
    _, total, cache = fg.while_loop(lambda c: c[0] < 2 + odd, turn, carry)
    steps = torch.linspace(0.1, 0.4, 4, device=total.device)
    total, means = fg.scan(lambda c, x: (c + x * rows, c.mean(-1)), total, steps)
    return total + means.sum(0)[:, None], cache


def loops() -> None:
    """Graphs with conditional nodes: served, released, captured again, slept and woken."""
    params = toys.attention_params(layers=1, device=DEVICE)
    cache = toys.attention_cache(layers=1, device=DEVICE)
    fast = fg.graphify(turns, modes="FULL", donate="cache", stage="batch", sizes=SIZES)
    step = fast.bind(params).capture(cache, LIMITS, progress=False)

    def served() -> None:
        for like in LIKES[:4]:
            want, after = toys.bare(turns, params, cache, toys.on(like, DEVICE))
            got, _ = step(cache, like)
            toys.assert_trees((got, cache), (want, after), **CLOSE)

    served()
    step.recapture()
    served()
    step.sleep()
    step.wake()
    served()
    assert step.stats.share("FULL") == 1


def main() -> None:
    """Raises where a result is wrong."""
    loops()
    for modes, outputs in (("FULL_AND_PIECEWISE", "own"), ("FULL", "borrow")):
        params = toys.attention_params(layers=1, device=DEVICE)
        cache = toys.attention_cache(layers=1, device=DEVICE)
        fast = fg.graphify(
            toys.attend, modes=modes, donate="cache", stage="batch", sizes=SIZES, outputs=outputs
        )
        step = fast.bind(params).capture(cache, LIMITS, progress=False)
        keys = list(step.replays)
        serve(step, params, cache)
        print(step.stats.as_text())
        ran = {name for name in ("FULL", "PIECEWISE", "NONE") if step.stats.share(name)}
        assert ran == {"FULL", "NONE"} | ({"PIECEWISE"} if modes != "FULL" else set())

        key = step.dispatch(LIKES[2].spec).descriptor
        step.release(key)
        assert len(step) == len(keys) - 1
        check(step, params, cache, LIKES[2], "host")  # captures it again
        step.recapture()
        serve(step, params, cache)
        step.sleep()
        assert not len(step)
        step.wake()
        assert set(step.replays) == set(keys)
        serve(step, params, cache)
        step.sleep(cache=True)
        step.wake()
        assert not any(x.any() for x in toys.leaves(cache))
        serve(step, params, cache)
        if DEVICE.type == "cuda":
            streams = [torch.cuda.Stream(), torch.cuda.Stream()]
            for i, like in enumerate(LIKES):
                streams[i % 2].wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(streams[i % 2]):
                    check(step, params, cache, like, "host_batch")
                torch.cuda.synchronize()
    print(f"clean on {DEVICE}")


if __name__ == "__main__":
    main()
