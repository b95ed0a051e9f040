"""A fuzzer of whole programs: are they right, or refused with a reason? In processes, from seeds.

    python tests/fuzz.py --programs 50000            # the same ones each time
    python tests/fuzz.py --programs 50000 --fresh    # others each time; the seed is told
    python tests/fuzz.py --only 1234                 # one: its code, and what differs
    python tests/fuzz.py --device cuda --programs 2000

`tests/fx/rows/rows_tried.py` says what is tried of each. A result that differs is "wrong", an error
that is not ours is "raw"; either is a fault, told with its seed, and the exit status is 1. Where an
op of torch's computes other numbers elsewhere in memory it is "torch", with the op's name. On CUDA
a bad index ends its process: a fault of its seed too, behind which another process goes on.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
for folder in (TESTS.parent, TESTS, TESTS / "fx" / "rows"):
    sys.path.insert(0, str(folder))
os.environ.setdefault("OMP_NUM_THREADS", "1")

CHUNK = 20  # programs that a process is given at a time
PATIENCE = 120.0  # seconds for one program, past which its process is taken to hang
FAULTS = ("wrong", "raw", "died", "hung")


def main() -> None:
    asked = arguments()
    if asked.only is not None:
        sys.exit(show(asked.only, asked.device))
    first = random.SystemRandom().randrange(1 << 40) if asked.fresh else asked.seed
    began, kinds, faults, reached = time.monotonic(), Counter(), [], Counter()
    for said in outcomes(first, asked.programs, asked.workers, asked.device, asked.seconds):
        if isinstance(said, Counter):
            reached += said
            continue
        seed, kind, why = said
        kinds[f"{kind}: {why}" if kind in ("refused", "torch") else kind] += 1
        if kind in FAULTS:
            faults.append({"seed": seed, "kind": kind, "why": why})
        if kind in (*FAULTS, "torch"):
            print(f"{kind}: --only {seed}: {why[:500]}", flush=True)
    seconds, tried = time.monotonic() - began, sum(kinds.values())
    result = {
        "device": asked.device, "first seed": first, "programs": tried,
        "workers": asked.workers, "seconds": round(seconds, 1),
        "counts": dict(sorted(kinds.items())),
        "faults": faults, "reached": dict(sorted(reached.items())),
        "unreached": unreached(reached), "unmet pairs of marks": unmet(reached),
    }  # fmt: skip
    if asked.coverage:
        print_coverage(reached)
    if asked.out:
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
    print("\n".join(f"{n:8} {kind}" for kind, n in sorted(kinds.items())))
    print(
        f"{tried} programs from seed {first}, {asked.workers} processes, {asked.device}, "
        f"{seconds:.0f} s ({tried / seconds:.1f} a second): {len(faults)} faults, "
        f"{len(result['unreached'])} rules or refusals not reached"
    )
    sys.exit(bool(faults))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first program; then one more each"
    )
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none after")
    parser.add_argument("--fresh", action="store_true", help="begin at a seed that nobody has had")
    parser.add_argument("--workers", type=int, default=max((os.cpu_count() or 2) - 1, 1))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, help="a file for the result, JSON")
    parser.add_argument("--coverage", action="store_true", help="print what was reached")
    parser.add_argument("--only", type=int, metavar="SEED", help="try and print this program alone")
    return parser.parse_args()


def outcomes(first: int, programs: int, workers: int, device: str, seconds: float) -> Iterator[Any]:
    """(seed, kind, why) of each program, and now and then a `Counter` of what was reached."""
    todo = [
        range(s, min(s + CHUNK, first + programs)) for s in range(first, first + programs, CHUNK)
    ]
    todo.reverse()
    crew = {Worker(device) for _ in range(min(workers, len(todo)))}
    end = time.monotonic() + seconds
    while crew:
        if time.monotonic() > end:
            todo.clear()
        for man in list(crew):
            if man.left is None and todo:
                man.give(todo.pop())
            elif man.left is None:
                crew.discard(man)
                man.end()
        for man in crew & {m for m in crew if m.pipe in wait([c.pipe for c in crew], timeout=1)}:
            try:
                said = man.hear()
            except (EOFError, ConnectionError):  # it has died with the program at hand
                man.process.join()
                said = (man.left.start, "died", f"its process ended with {man.process.exitcode}")
                replace(crew, man, todo, device)
            if said is not None:
                yield said
        for man in [m for m in crew if time.monotonic() - m.heard > PATIENCE and m.left]:
            man.process.kill()
            yield man.left.start, "hung", f"no word for {PATIENCE:.0f} s"
            replace(crew, man, todo, device)


class Worker:
    """A process that tries programs, and what it has left to try."""

    def __init__(self, device: str) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=work, args=(theirs, device), daemon=True)
        self.process.start()
        theirs.close()
        self.left: range | None = None
        self.heard = time.monotonic()

    def give(self, seeds: range) -> None:
        self.left, self.heard = seeds, time.monotonic()
        self.pipe.send(seeds)

    def hear(self) -> Any:
        said, self.heard = self.pipe.recv(), time.monotonic()
        if isinstance(said, Counter):  # the last word of what it was given
            self.left = None
        elif self.left is not None:
            self.left = self.left[1:]
        return said

    def end(self) -> None:
        self.pipe.send(None)
        self.process.join()


def replace(crew: set[Worker], man: Worker, todo: list[range], device: str) -> None:
    """Another process in place of one that is gone, for what it has not tried."""
    crew.discard(man)
    if man.left is not None and len(man.left) > 1:
        todo.append(man.left[1:])
    if todo:
        crew.add(Worker(device))


def work(pipe: Connection, device: str) -> None:
    """What a process does: it tries the seeds that come, says what became of each, then what it has
    reached."""
    import torch
    from fuzz_coverage import look
    from rows_tried import outcome

    torch.set_num_threads(1)
    if device == "cuda":
        torch.use_deterministic_algorithms(True, warn_only=True)  # writes to one row twice
    gc.collect()
    gc.freeze()  # or each look at what is loaded takes half a second
    while (seeds := pipe.recv()) is not None:
        reached: Counter[str] = Counter()
        end = look(reached)
        for seed in seeds:
            found = outcome(seed, device)
            pipe.send((seed, found.kind, found.why))
        end()
        pipe.send(reached)


def show(seed: int, device: str) -> bool:
    """Print one program and what became of it; whether it is a fault."""
    from rows_tried import code_of, outcome

    found = outcome(seed, device)
    print(found.code or code_of(seed))
    print(f"{seed}: {found.kind} {found.why}")
    return found.kind in FAULTS


def unreached(reached: Counter[str]) -> list[str]:
    from fuzz_coverage import unreached

    return unreached(reached)


def unmet(reached: Counter[str]) -> dict[str, list[str]]:
    from fuzz_coverage import unmet

    return unmet(reached)


def print_coverage(reached: Counter[str]) -> None:
    """Tables of what was reached, and a list of what was not."""
    from fuzz_coverage import never, tables
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for title, head, rows in tables(reached):
        table = Table(*head, title=title, title_justify="left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for text in unreached(reached):
        print(f"not reached: {text}")
    for text in never(unmet(reached)):
        print(f"marks: {text}")


if __name__ == "__main__":
    main()
