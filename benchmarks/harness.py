"""One harness for every benchmark: its flags, its tables, its figures as JSON, its exit status.

A module or folder of this package that is named below has a function under `@Benchmark`; `main`
does the rest. The status is 0 where all that is asked of the figures is met, 1 where it is not, and
2 for a mistake in the command. torch comes in with a device or the JSON: some need neither.

Rows go through `kept`, which writes each as it comes: a run that is cut has them, "unfinished".
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import importlib
import importlib.metadata
import json
import math
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import fngraph as fg

NAMES = ("attention", "capture", "compile", "decode", "dispatch", "encoder", "fp8", "host",
         "latent", "launch", "linear", "prefill", "ranks", "recurrent", "serve", "staging",
         "startup", "steps", "trace", "traffic", "train", "verify")  # fmt: skip
MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
REFUSED = (fg.errors.BackendError, fg.errors.ModesError, fg.errors.PackageError,
           fg.errors.SizesError, fg.errors.SpecError)  # fmt: skip
Flags = dict[str, dict[str, Any]]  # name -> what `add_argument` takes
Row = dict[str, Any]
Rows = Sequence[Mapping[str, Any]]


class Mistake(Exception):
    """Flags that do not go together, or ask for what is not here."""


@dataclasses.dataclass
class Benchmark:
    """Declares the function below it, from flags to figures; those that are None are not kept.

    Attributes:
        flags: its own, beside --quick and --json.
        quick: defaults under --quick, which other flags still change.
        missed: what was asked of the figures and is not met, a line each.
        needs_cuda: whether there is nothing to measure without a GPU.
    """

    flags: Flags = dataclasses.field(default_factory=dict)
    quick: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    missed: Callable[[Any, argparse.Namespace], Sequence[str]] = lambda figures, flags: ()
    needs_cuda: bool = False

    def __call__(self, measure: Callable[[argparse.Namespace], Any]) -> Benchmark:
        """Under its name there is this benchmark then."""
        self.figures_of = measure
        return self


def main(argv: Sequence[str]) -> int:
    """Measure what is named, keep it if asked to, and judge it."""
    listing = argparse.ArgumentParser(prog="python -m benchmarks", description="Measurements.")
    listing.add_argument("name", choices=NAMES, help="NAME --help has what it is, and its flags")
    name = listing.parse_args(argv[:1]).name
    declared: Benchmark = importlib.import_module(f"benchmarks.{name}").measure
    flags = parse(name, argv[1:])
    try:
        figures = declared.figures_of(flags)
    except (Mistake, *REFUSED) as error:
        print(f"python -m benchmarks {name}: error: {error}", file=sys.stderr)
        return 2
    if figures is None:
        return 0
    write(flags, figures)
    missed = declared.missed(figures, flags)
    for line in missed:
        print(line)
    return int(bool(missed))


def parse(name: str, argv: Sequence[str]) -> argparse.Namespace:
    """The flags of a benchmark, and the command without the file that figures go to."""
    module = importlib.import_module(f"benchmarks.{name}")
    prog, declared = f"python -m benchmarks {name}", module.measure
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=prog, description=module.__doc__, formatter_class=shape)
    for flag, options in declared.flags.items():
        parser.add_argument(flag, **options)
    parser.add_argument("--quick", "--tiny", action="store_true", help="small: see that it runs")
    parser.add_argument("--json", type=Path, help="keep the figures here")
    if parser.parse_args(argv).quick:
        parser.set_defaults(**declared.quick)
    flags = parser.parse_args(argv)
    if declared.needs_cuda or "device" in flags:
        import torch

        found = "cuda" if declared.needs_cuda or torch.cuda.is_available() else "cpu"
        flags.device = getattr(flags, "device", None) or found
        try:
            torch.empty(0, device=flags.device)
        except (RuntimeError, AssertionError) as error:  # AssertionError: a torch without CUDA
            parser.error(f"needs a device {flags.device!r}: {str(error).splitlines()[0]}")
    if getattr(flags, "backend", None) is not None:
        try:
            fg.ops.attention.level(flags.backend)
        except fg.errors.BackendError as error:
            parser.error(f"--backend {flags.backend}: {error}")
    if flags.json is not None:
        try:
            flags.json.parent.mkdir(parents=True, exist_ok=True)
            if flags.json.is_dir():
                raise IsADirectoryError(f"{flags.json} is a folder")
        except OSError as error:
            parser.error(f"--json {flags.json}: {error.strerror or error}")
    kept = [word for before, word in zip([None, *argv], argv)
            if "--json" not in (before, word.split("=")[0])]  # fmt: skip
    flags.command = " ".join([prog, *kept])
    return flags


def count(
    default: int | list[int], about: str | None = None, *, least: int = 1, multiple_of: int = 1,
    most: int = 2**31 - 1,
) -> dict[str, Any]:  # fmt: skip
    """A flag that is a whole number, `least` to `most`; several, if its default is a list: in
    ascending order, each once, whatever order they are given in."""

    def number(word: str) -> int:
        found = int(word)
        if found < least or found % multiple_of:
            wanted = f"{least} or more"
            if multiple_of > 1:
                wanted = f"a multiple of {multiple_of}: {multiple_of}, {2 * multiple_of}, ..."
            raise argparse.ArgumentTypeError(f"{word} is not {wanted}")
        if found > most:
            raise argparse.ArgumentTypeError(f"{word} is more than {most}")
        return found

    more = {"nargs": "+", "action": _Ascending} if isinstance(default, list) else {}
    return {"type": number, "default": default, "help": about, **more}


class _Ascending(argparse.Action):
    def __call__(self, parser: Any, flags: Any, given: Any, option: str | None = None) -> None:
        setattr(flags, self.dest, sorted({*given}))


def factor(default: float, about: str) -> dict[str, Any]:
    """A flag that is a number above 0."""

    def number(word: str) -> float:
        found = float(word)
        if not 0 < found < math.inf:
            raise argparse.ArgumentTypeError(f"{word} is not above 0")
        return found

    return {"type": number, "default": default, "help": about}


def some_of(choices: Sequence[str], default: Sequence[str] | None = None) -> dict[str, Any]:
    """A flag that names one or more of these; all, if nothing else is said."""
    chosen = choices if default is None else default
    return {"nargs": "+", "choices": choices, "default": list(chosen)}


DEVICE: Flags = {"--device": {"help": "the GPU, if there is one"}}
BACKEND: Flags = {"--backend": {"help": "of attention; what suits the device, if none is named"}}
SWEEP: Flags = {"--sweep": {"action": "store_true", "help": "other tiles and splits, alone"}}
ENDS: Flags = {"--seconds": count(0, "after which no way is begun; 0: no limit", least=0)}
LATE = "left out: --seconds are over"


def ends_of(flags: argparse.Namespace) -> float:
    """The time, in seconds of `time.monotonic`, after which no way is begun."""
    return time.monotonic() + flags.seconds if flags.seconds else math.inf


def show(rows: Rows, title: str = "") -> None:
    """A table, and below it what failed."""
    print("", *[title] * bool(title), as_text(rows), sep="\n")
    for row in rows:
        for name in filter(_failed, row):
            print(f"  {', '.join(map(str, list(row.values())[:2]))}: {name}: {row[name]}")


def as_text(rows: Rows) -> str:
    """As Markdown; numbers short, what is not there a dash. A column that no row has is left out:
    a limit, where nothing is asked of any."""
    there = dict.fromkeys(n for row in rows for n in row if row[n] is not None)
    names = [name for name in dict.fromkeys(n for row in rows for n in row)
             if name in there and not _failed(name)]  # fmt: skip
    return fg.core.text.table(names, [[_cell(row.get(name)) for name in names] for row in rows])


def _failed(name: str) -> bool:
    return name.endswith("failed")


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
    return "-" if value is None else str(value)


def over(rows: Rows, figure: str, limit: str) -> list[str]:
    """The rows whose figure is above its limit, a line each."""
    return [f"{_cell(row[figure])}, and at most {row[limit]} is asked: {row}"
            for row in rows if row[limit] is not None and row[figure] > row[limit]]  # fmt: skip


def kept(
    flags: argparse.Namespace, rows: Iterable[Row], figures: Row | None = None, part: str = ""
) -> list[Row]:
    """All rows, written as each of them comes.

    Args:
        figures: what they are put into as they come, under the name `part`, behind those that are
            there; None: they are all.
    """
    found: list[Row] = [] if figures is None else figures.setdefault(part, [])
    for row in rows:
        found.append(row)
        write(flags, found if figures is None else figures, unfinished=True)
    return found


def write(flags: argparse.Namespace, figures: Any, unfinished: bool = False) -> None:
    """Figures with their environment, where --json says; whole, whenever the run is cut."""
    if flags.json is None:
        return
    figured = {"environment": environment(flags.command), "figures": figures}
    text = json.dumps({"unfinished": True} | figured if unfinished else figured, indent=1) + "\n"
    if flags.json.exists() and not flags.json.is_file():  # a pipe, /dev/stdout
        flags.json.write_text(text)
        return
    to = flags.json.resolve()
    aside = to.with_name(f"{to.name}.part")
    aside.write_text(text)
    aside.replace(to)


@functools.cache
def environment(command: str) -> dict[str, str]:
    """The machine and the software, as far as a figure depends on them."""
    import torch

    found = {"device": platform.processor() or platform.machine(), "torch": torch.__version__}
    try:
        found["triton"] = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        pass  # a CPU runs without
    found |= {"python": platform.python_version(), "command": command,
              "date": datetime.date.today().isoformat()}  # fmt: skip
    if (Path(__file__).parents[1] / ".git").exists():
        told = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
        commit = subprocess.run(told, capture_output=True, text=True, check=False).stdout
        found["commit"] = commit.strip()  # "-dirty": and what was not committed
    if torch.cuda.is_available():
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout
        found |= {"device": torch.cuda.get_device_name(), "driver": driver.split("\n")[0]}
    return found
