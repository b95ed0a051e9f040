"""Fixtures of all tests. Nothing here loads torch before a test asks for it: core runs without."""

from __future__ import annotations

import gc
import logging
import os
import random
import resource
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NamedTuple

import pytest


class Kit(NamedTuple):
    """A recorder on its device, and how to see how much of its pool is in use."""

    recorder: Any
    device: Any

    @property
    def used(self) -> int:
        """Bytes in use: of the tape's arena, or of the CUDA device."""
        if self.recorder.name == "tape":
            return sum(self.recorder.arena.live.values())
        import torch

        gc.collect()  # or another test's garbage goes in between two looks
        return torch.cuda.memory_allocated(self.device)


class Held(NamedTuple):
    """What this process holds, whatever other processes do on the device meanwhile.

    Attributes:
        reserved: bytes that torch has of the device, the pools of graphs among them.
        graphs: CUDA graphs that are alive; what the driver keeps for each goes with it.
        host: bytes of host memory, in which the driver keeps its part of a graph or a launch.
    """

    reserved: int
    graphs: int
    host: int

    def check_flat(self, before: Held, slack: int = 4 << 20) -> None:
        """Assert that nothing has been kept since."""
        assert self.reserved - before.reserved <= slack
        assert self.graphs == before.graphs
        assert self.host - before.host <= HOST_SLACK


HOST_SLACK = 64 << 20  # what Python's and C's allocators keep for themselves


def pytest_configure() -> None:
    """Workers side by side share out the GPUs, before torch looks which there are.

    Nobody listens to torch's log for machines, but pytest, which adds itself to each logger that
    does not propagate; then torch writes a stack for each symbol, and graphs for each compilation.
    """
    logging.getLogger("torch.__trace").addHandler = lambda handler: None  # type: ignore[method-assign]
    if worker := os.environ.get("PYTEST_XDIST_WORKER"):
        share_out_gpus(int(worker.removeprefix("gw")))


def share_out_gpus(worker: int) -> None:
    """Have this process see all GPUs, with another one first for each worker: tests' cuda:0."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    there = len(list(Path("/dev").glob("nvidia[0-9]*")))
    gpus = list(map(str, range(there))) if named is None else named.split(",")
    if len(gpus) > 1:
        first = worker % len(gpus)
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first:] + gpus[:first])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Nothing that is loaded with the tests is garbage: a fifth of the time went into looking."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`sampled(n)`: n of a test's cases, always the same, are what `make test` runs; or those whose
    names have one of the texts in `sampled(...)`. The others are the `rest`, as is the only case of
    `sampled(0)`. Who names a test gets it."""
    if any("::" in argument for argument in config.args):
        return
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("gpu"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, of_one in cases.items():
        chosen = of_one[0].get_closest_marker("sampled").args  # type: ignore[union-attr]
        ids = sorted(item.nodeid for item in of_one)
        if isinstance(chosen[0], int):
            kept = random.Random(name).sample(ids, min(chosen[0], len(ids)))
        else:
            kept = [x for x in ids if any(text in x for text in chosen)]
        if chosen != (0,) and not kept:
            raise pytest.UsageError(f"{name}: sampled{chosen} names none of its cases")
        for item in of_one:
            if item.nodeid not in kept:
                item.add_marker("rest")


BEGAN = time.monotonic()
NO_TIME = "no time was left for the rest"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """`REST_MINUTES=50`: of the `rest`, what has not begun after so long is left out, so that CI's
    answer does not depend on how fast its machine is. The samples are always run."""
    minutes = float(os.environ.get("REST_MINUTES") or "inf")
    if item.get_closest_marker("rest") and time.monotonic() - BEGAN > 60 * minutes:
        pytest.skip(NO_TIME)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many of the `rest` were left out."""
    skipped = terminalreporter.stats.get("skipped", [])
    if left_out := sum(NO_TIME in str(one.longrepr) for one in skipped):
        minutes = os.environ["REST_MINUTES"]
        terminalreporter.write_line(f"{left_out} cases NOT run: {NO_TIME} after {minutes} minutes")


@pytest.fixture(autouse=True, scope="module")
def frozen() -> None:
    """Hide what is loaded by now from the collector, whose every look takes half a second else."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def compiled_once(tmp_path_factory: pytest.TempPathFactory) -> Generator[Path]:
    """What is compiled is kept for the run, all of its processes, and not where the user's own
    is."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "fngraph"
    folder.mkdir(mode=0o700, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FNGRAPH_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def one_thread() -> Generator[None]:
    """Two that others keep waiting take 20 times as long as one."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=["tape", pytest.param("cuda", marks=pytest.mark.gpu)])
def recorder_name(request: pytest.FixtureRequest) -> str:
    """Each recorder in turn; "cuda" with `-m gpu` alone."""
    return request.param


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request: pytest.FixtureRequest) -> str:
    """Each device in turn, for what is not recorded; "cuda" with `-m gpu` alone."""
    return request.param


@pytest.fixture
def device(recorder_name: str) -> Any:
    """The device that the recorder records on."""
    import torch

    return torch.device("cuda", 0) if recorder_name == "cuda" else torch.device("cpu")


@pytest.fixture
def held() -> Callable[[], Held]:
    """A look at what this process holds, once the device is done."""
    import torch

    def look() -> Held:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        gc.collect()
        graphs = sum(type(x) is torch.cuda.CUDAGraph for x in gc.get_objects())
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        reserved = torch.cuda.memory_reserved() if torch.cuda.is_available() else 0
        return Held(reserved, graphs, pages * resource.getpagesize())

    return look


@pytest.fixture
def tape() -> Any:
    """A new tape."""
    import torch

    from fngraph.graphs.recorders import make_recorder

    return make_recorder("tape", torch.device("cpu"))


@pytest.fixture
def kit(recorder_name: str, device: Any) -> Kit:
    """A recorder whose first capture is behind it: on CUDA what holds the pool comes with that."""
    from fngraph.graphs.recorders import make_recorder

    kit = Kit(make_recorder(recorder_name, device), device)
    if recorder_name == "cuda":
        kit.recorder.record(lambda: None)
    return kit


@pytest.fixture(params=["attend", "tally", "tally_"])
def toy(request: pytest.FixtureRequest, device: Any) -> Any:
    """Each toy, on the recorder's device."""
    import toys

    return toys.model(request.param, device)
