"""What the text of a function has besides its own code: whatever it may compute by, wherever that
is held. Each change is another key, and another process writes the same.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numpy")
ROOT = Path(__file__).parents[2]

OTHERS = """
import os
S = float(os.environ["TOLD_S"])

class Base:
    def scale(self, x):
        return x * S
"""
KERNELS = """
import collections, fractions, functools, operator, re, types
import numpy as np
import torch
import told_others as others
from told_others import S

n = int(S)
def plain(x): return x * {held}
"""
HELD = {  # what a function reads, of a number that another module has
    "an array": "np.array([S])",
    "a function of numpy's": "[np.sin, np.cos][n % 2]",
    "a namespace": "types.SimpleNamespace(s=S)",
    "a view of a dict": "types.MappingProxyType({'s': S})",
    "a queue": "collections.deque([S])",
    "a fraction": "fractions.Fraction(n, 7)",
    "a range": "range(n)",
    "an expression": "re.compile('a' * n)",
    "a getter": "operator.itemgetter(n)",
    "a method of a dict": "{'s': S}.get",
    "an op": "[torch.ops.aten.sin.default, torch.ops.aten.cos.default][n % 2]",
    "a function of torch's": "[torch.sin, torch.cos][n % 2]",
    "a layout": "[torch.channels_last, torch.contiguous_format][n % 2]",
    "a module": "torch.nn.LeakyReLU(S)",
    "a parameter": "torch.nn.Parameter(torch.full((2,), S))",
    "a long tensor": "torch.full((5000,), S)",
    "what is cached": "functools.lru_cache((lambda: 1) if n % 2 else (lambda: 2))",
    "a class": "type('C', (), {'s': S, '__module__': __name__})",
    "an object of such": "type('C', (), {'s': S, '__module__': __name__})()",
    "a method's own global": "others.Base().scale",
    "an object whose method has one": "others.Base()",
    "one by a base": "type('C', (others.Base,), {'__module__': __name__})()",
    "a property": "type('C', (), {'p': property(lambda self: S), '__module__': __name__})",
    "a method of an object": "types.MethodType(lambda self, x: x, types.SimpleNamespace(s=S))",
    "a dict by dtype": "{torch.float32: 1, torch.int64: S}",
    "a list in itself": "(lambda x: (x.append(x), x)[1])([S])",
    "a set of pairs": "{('a', S), ('b', 1)}",
}
BODIES = {  # other ways to hold it
    "a default by name": "def plain(x, *, s=S): return x * s",
    "a default of what it calls": (
        "def inner(x, *, s=S): return x * s\ndef plain(x): return inner(x)"
    ),
    "what is set on it": "def plain(x): return x * plain.s\nplain.s = S",
    "one that says it is torch's": (
        "@functools.wraps(torch.nn.functional.relu)\ndef plain(x): return x * S"
    ),
    "behind a function of torch's": "@torch.no_grad()\ndef plain(x, *, s=S): return x * s",
    "an op of one's own, by name": (
        "@torch.library.custom_op('told::scale', mutates_args=())\n"
        "def scale(x: torch.Tensor) -> torch.Tensor: return x * S\n"
        "def plain(x): return torch.ops.told.scale(x)"
    ),
    "an op of one's own": (
        "@torch.library.custom_op('told::scale', mutates_args=())\n"
        "def scale(x: torch.Tensor) -> torch.Tensor: return x * S\n"
        "def plain(x): return scale(x)"
    ),
    "an overload of it": (
        "@torch.library.custom_op('told::scale', mutates_args=())\n"
        "def scale(x: torch.Tensor) -> torch.Tensor: return x * S\n"
        "op = torch.ops.told.scale.default\ndef plain(x): return op(x)"
    ),
}
CHILD = """
import importlib, sys
from fngraph.torch_facts.sources import text_of
for name in sys.argv[1:]:
    print(text_of(importlib.import_module(name).plain))
"""


def texts(folder: Path, names: list[str], number: int, seed: str) -> list[str]:
    """Of each module's function, in a process of its own."""
    path = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    given = {"TOLD_S": str(number), "PYTHONHASHSEED": seed, "PYTHONPATH": path}
    ran = subprocess.run(
        [sys.executable, "-c", CHILD, *names],
        env=os.environ | given, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.split()


def test_all_that_it_may_compute_by_is_in_its_text(tmp_path: Path):
    """No file changes: a number does that one module reads from the environment."""
    tmp_path.joinpath("told_others.py").write_text(OTHERS)
    told = {}
    for number, what in enumerate((*HELD, *BODIES)):
        told[f"told_{number}"] = what
        if what in HELD:
            text = KERNELS.format(held=f"held\nheld = {HELD[what]}")
        else:
            text = KERNELS.rpartition("def")[0] + BODIES[what].replace("told::", f"told{number}::")
            text = text.replace("ops.told.", f"ops.told{number}.")
        tmp_path.joinpath(f"told_{number}.py").write_text(text)
    names = list(told)
    first, other, again = (
        texts(tmp_path, names, n, seed) for n, seed in ((2, "1"), (3, "2"), (2, "3"))
    )
    assert [told[n] for n, a, b in zip(names, first, other) if a == b] == []
    assert [told[n] for n, a, b in zip(names, first, again) if a != b] == []
    assert len(first) == len(names)
