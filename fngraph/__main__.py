"""`python -m fngraph report FILE`: a page of a run, FILE what `step.log.save(FILE)` wrote.

`python -m fngraph cache ls | clear | warm`: the folder in which compiled code is kept.

    ls                  what is there, the most recently used first
    clear               remove all of it
    warm MODULE:NAME    import MODULE and call NAME, which compiles (traces a function and calls
                        `.compile()`, or captures), so that later processes compile nothing

The folder is FNGRAPH_CACHE, or `fngraph` in the user's cache folder.

`python -m fngraph env`: what is here of all that it runs on, and what is slower for want of it.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from fngraph.compile.disk import Disk, difference, disk_of, is_same_piece
from fngraph.core.flights.log import MADE, Log
from fngraph.core.text import count, table
from fngraph.errors import SpecError


def main(argv: Sequence[str]) -> int:
    """Do what is asked for; 0 where that was done, 1 where there was nothing to warm, 2 for a
    mistake in the command or the environment."""
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m fngraph", None, __doc__, formatter_class=shape)
    words = parser.add_subparsers(dest="word", metavar="cache | env | report", required=True)
    report = words.add_parser("report", help="one HTML page of a run")
    report.add_argument("log", metavar="FILE", help="what step.log.save(FILE) wrote")
    report.add_argument("--out", type=Path, help="the page; beside FILE, if it is not said")
    report.add_argument("--trace", type=Path, help="also a trace, for Perfetto and TensorBoard")
    cache = words.add_parser("cache", help="compiled code on the disk")
    words.add_parser("env", help="versions, devices, and what is missing")
    verbs = cache.add_subparsers(dest="verb", metavar="ls | clear | warm", required=True)
    verbs.add_parser("ls", help="what is there")
    verbs.add_parser("clear", help="remove it")
    warm = verbs.add_parser("warm", help="fill it")
    warm.add_argument("call", metavar="MODULE:NAME", help="what compiles when it is called")
    flags = parser.parse_args(argv)
    if flags.word == "report":
        for name in ("out", "trace"):
            path = getattr(flags, name)
            if path is not None and (path.is_dir() or not path.parent.is_dir()):
                report.error(f"--{name} {path}: name a file in a folder that there is")
        page = flags.out or Path(flags.log).with_suffix(".html")
        written = [path.resolve() for path in (Path(flags.log), page, flags.trace) if path]
        if len(set(written)) < len(written):
            report.error(
                f"{flags.log} is read, {' and '.join(map(str, filter(None, (page, flags.trace))))} "
                "written: name files of their own, --out page.html --trace trace.json"
            )
        try:
            print(_reported(Path(flags.log), page, flags.trace))
        except (OSError, UnicodeDecodeError, SpecError) as error:
            made = "" if isinstance(error, SpecError) else f". {MADE}"  # which says it itself
            report.error(f"{flags.log}: {_why(error)}{made}")
        return 0
    if flags.word == "env":
        from fngraph.report.env import shown  # loads what it tells of

        print(shown(os.environ))
        return 0
    try:
        disk = disk_of(os.environ)
    except ValueError as error:
        parser.error(str(error))
    if disk is None:
        parser.error("FNGRAPH_CACHE is off: set it to a folder, or leave it out")
    if (why := disk.why_unused()) is not None:
        parser.error(why)
    if flags.verb == "ls":
        print(_listed(disk))
    elif flags.verb == "clear":
        print(f"{disk.folder}: {count(disk.clear(), 'artefact')} removed")
    else:
        try:
            call = _named(flags.call)
        except LookupError as error:
            warm.error(error.args[0])
        return _warm(disk, call)
    return 0


def _reported(log: Path, page: Path, trace: Path | None) -> str:
    """Write the page, and the trace if it is asked for; what was written."""
    from fngraph.report.log_page import page_of

    found = Log.loads(log.read_text())
    page.write_text(page_of(found))
    if trace is not None:
        found.save_trace(trace)
    return " ".join(map(str, filter(None, (page, trace))))


def _why(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "this is no text"
    return (getattr(error, "strerror", None) or str(error)).partition("\n")[0]


def _listed(disk: Disk) -> str:
    rows = []
    for entry in disk.entries():
        facts = entry.facts or {}
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
        what = [facts.get(name, "") for name in ("name", "holds", "ms", "kernels", "torch")]
        what[0] = what[0] or "damaged"
        rows.append([entry.digest[:12], *what, entry.nbytes, used])
    names = ["artefact", "piece", "sizes", "ms to make", "kernels", "torch", "bytes", "used"]
    parts = [table(names, rows), *_twice(disk), str(disk)]
    return "\n\n".join(parts if rows else parts[-1:])


def _twice(disk: Disk) -> Iterator[str]:
    """What was made more than once for the same sizes, and in what the keys differ."""
    latest: list[tuple[str, Mapping[str, str]]] = []
    for entry in disk.entries():
        if entry.facts is None:
            continue
        for digest, facts in latest:
            if is_same_piece(facts, entry.facts):
                parts = ", ".join(difference(facts, entry.facts))
                yield (
                    f"{digest[:12]} and {entry.digest[:12]}, {facts.get('name')} for "
                    f"{facts.get('range')}, differ in {parts}"
                )
                break
        else:
            latest.append((entry.digest, entry.facts))


def _named(word: str) -> Callable[[], object]:
    """The function that MODULE:NAME names, of no arguments.

    Raises:
        LookupError: there is none. What a module itself raises is left as it is.
    """
    module, _, name = word.partition(":")
    if not module or not name:
        raise LookupError(f"{word!r}: expected MODULE:NAME, as in mine.serving:compile_all")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise  # one that MODULE imports
        raise LookupError(
            f"{word!r}: there is no module {error.name!r} in {Path.cwd()} or among what is "
            "installed. Dots, not slashes, and no .py: mine.serving:compile_all"
        ) from None
    if not callable(found):
        what = "has no" if found is None else "cannot be called:"
        raise LookupError(f"{word!r}: {module} {what} {name!r}. Name a function")
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise LookupError(f"{word!r}: {error}. Name a function that takes nothing") from None
    except ValueError:
        pass  # one in C, which does not say
    return found


def _warm(disk: Disk, call: Callable[[], object]) -> int:
    before = {entry.digest for entry in disk.entries()}
    call()
    new = sum(entry.digest not in before for entry in disk.entries())
    print(f"{count(new, 'artefact')} made. {disk}")
    return int(not disk.entries())


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)  # as a shell has it
