"""Mutation testing of every line of `fngraph.core`: python tests/mutate.py [module ...]

Makes each change that mutmut knows at every place that it fits, one at a time, and runs tests/core:
the tests whose first line names the module, then all. mutmut itself leaves out decorated functions,
`__new__`, class and module level, and the arguments of `len` and `isinstance`; this leaves out
annotations alone, which nothing evaluates. Needs `pip install mutmut` (for its operators) beside
the dev requirements. No file is written: a fork of this process imports the changed source.
"""

from __future__ import annotations

import difflib
import gc
import os
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path

import hypothesis
import libcst as cst
import numpy  # noqa: F401  what tests import is imported here once, and forked
import optree  # noqa: F401
import pytest
from libcst.metadata import MetadataWrapper
from mutmut.mutation.mutators import mutation_operators

ROOT = Path(__file__).parents[1]
CORE, TESTS = ROOT / "fngraph" / "core", ROOT / "tests" / "core"
SLOW = ("test_agreement.py", "test_dispatching_laws.py", "test_planner.py")  # for files they name
SECONDS = 60  # of a core, for one run of all other tests, which takes 3; past it, a timeout
GIGABYTES = 6  # of memory, past which a mutant fails by itself
OPTIONS = ["-x", "-q", "-s", "--tb=no", "--assert=plain", "-pno:cacheprovider"]
OPTIONS += ["-pno:unraisableexception", "-pno:threadexception"]  # collect garbage at each end


class Places(cst.CSTVisitor):
    """Every node outside of annotations."""

    def __init__(self) -> None:
        self.nodes: list[cst.CSTNode] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        self.nodes.append(node)
        return not isinstance(node, cst.Annotation)


def mutants(source: str) -> Iterator[str]:
    """The source with one change, for each change that still compiles."""
    module, places, seen = MetadataWrapper(cst.parse_module(source)).module, Places(), {source}
    module.visit(places)
    for node in places.nodes:
        for kind, operator in mutation_operators:
            for changed in operator(node) if isinstance(node, kind) else ():
                code = module.deep_replace(node, changed).code
                if code not in seen and compiles(code):
                    yield code
                seen.add(code)


def compiles(code: str) -> bool:
    try:
        compile(code, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def outcome(config: pytest.Config, path: Path, source: str, tests: list[Path]) -> str:
    """Of the tests in a fork that takes the file to hold `source`: killed, survived or timeout."""
    if child := os.fork():
        status = os.waitpid(child, 0)[1]
        ends = {0: "survived", signal.SIGXCPU: "timeout", signal.SIGKILL: "timeout"}
        return ends.get(status & 0x7F or status, "killed")
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 5))
    resource.setrlimit(resource.RLIMIT_AS, (GIGABYTES << 30,) * 2)
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    plain = SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, name: str) -> object:
        return compile(source, self.path, "exec") if self.path == str(path) else plain(self, name)

    SourceFileLoader.get_code = get_code
    config.args[:] = map(str, tests)
    os._exit(config.hook.pytest_cmdline_main(config=config))


def names(test: Path, module: str) -> bool:
    """Whether the first line of a test says that it is about a module."""
    first = test.read_text().partition("\n")[0]
    full = "fngraph.core" if module == "__init__" else f"fngraph.core.{module.replace('/', '.')}"
    return f"`{full}`" in first or f"`{module}`" in first


class Mutate:
    """A pytest plugin in place of its main: one start of pytest serves every fork."""

    def __init__(self, modules: list[str]) -> None:
        self.modules = modules

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> int:
        config.pluginmanager.unregister(self)
        mutate(config, self.modules)
        return 0


def mutate(config: pytest.Config, modules: list[str]) -> None:
    """Prints each survivor when it is found, and the counts of each file."""
    gc.freeze()  # what is loaded here is no garbage in the forks
    every = sorted(TESTS.glob("test_*.py"))
    tests = [path for path in every if path.name not in SLOW]
    plain = CORE / "__init__.py"
    assert outcome(config, plain, plain.read_text(), tests) == "survived", "the tests fail as it is"
    assert outcome(config, plain, "nothing", tests) == "killed", "no change reaches the tests"
    files = (path.relative_to(CORE).with_suffix("") for path in CORE.rglob("*.py"))
    for name in modules or sorted(map(str, files)):
        path, counts = CORE / f"{name}.py", Counter()
        source, own = path.read_text(), [test for test in every if names(test, name)]
        began = time.monotonic()
        for code in mutants(source):
            found = outcome(config, path, code, own) if own else "survived"
            if found == "survived":
                found = outcome(config, path, code, tests)
            counts[found] += 1
            if found != "killed":
                diff = list(difflib.unified_diff(source.split("\n"), code.split("\n"), n=0))
                print(f"{name}: {found}", *diff[2:], sep="\n    ", flush=True)
        print(f"| {name} | {counts['killed']} | {counts['survived']} | {counts['timeout']} |")
        print(f"  {time.monotonic() - began:.0f} s", file=sys.stderr)
        sys.stdout.flush()


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.dont_write_bytecode = False  # or each fork would compile all of core
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)  # a failure is enough
    hypothesis.settings.register_profile("mutate", database=None, derandomize=True, phases=phases)
    hypothesis.settings.load_profile("mutate")
    pytest.main([*OPTIONS, str(TESTS)], plugins=[Mutate(sys.argv[1:])])
