"""DESIGN's layer table, held: imports walked with `ast`, torch kept out of core in a subprocess.

Each check is itself checked: a violation is planted in a copy of the tree and must be seen.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
STDLIB = set(sys.stdlib_module_names)

# layer -> what may be imported anywhere in it, and what only inside a function
BASE = {"fngraph.errors", "fngraph.core"}
FACTS = {"fngraph.torch_facts", "torch"}
PARTS = ("ops", "fx", "graphs", "passes", "compile", "ranks")
LOWER = BASE | FACTS | {f"fngraph.{name}" for name in PARTS}
STEP = LOWER | {f"fngraph.{name}" for name in ("options", "one_launch", "executable", "step")}
SHADOW = STEP | {"fngraph.calls", "fngraph.shadow"}
STAGES = SHADOW | {"fngraph.callables", "fngraph.stages", "fngraph.tracing"}
TRANSFORMS = STAGES | {
    f"fngraph.{name}" for name in ("graphified", "checking", "rehearsing", "encoder")
}
LAYERS: dict[str, tuple[set[str], set[str]]] = {
    "fngraph.errors": (set(), set()),
    "fngraph.core": (BASE, {"optree"}),
    "fngraph.torch_facts": (FACTS | {"fngraph.errors"}, {"cuda"}),
    "fngraph.ops": (
        BASE | FACTS | {"fngraph.ops", "einops", "triton"},
        {"flash_attn", "flash_attn_interface", "flashinfer", "cuda"},  # taken when present
    ),
    "fngraph.fx": (BASE | FACTS | {"fngraph.fx", "sympy"}, {"numpy"}),  # sympy: torch's own sizes
    "fngraph.graphs": (BASE | FACTS | {"fngraph.graphs", "triton", "numpy"}, {"cuda"}),
    "fngraph.passes": (BASE | FACTS | {"fngraph.fx", "fngraph.ops", "fngraph.passes"}, set()),
    "fngraph.compile": (BASE | FACTS | {"fngraph.fx", "fngraph.ops", "fngraph.compile"}, set()),
    "fngraph.ranks": (BASE | FACTS | {"fngraph.ops", "fngraph.ranks"}, set()),
    "fngraph.calls": (LOWER, set()),
    "fngraph.callables": (LOWER | {"fngraph.calls"}, set()),
    "fngraph.options": (LOWER, set()),
    "fngraph.one_launch": (LOWER, set()),
    "fngraph.executable": (LOWER | {"fngraph.one_launch"}, set()),
    "fngraph.stages": (STAGES, {"fngraph.report"}),  # a progress bar, when one is asked for
    "fngraph.tracing": (STAGES, set()),
    "fngraph.step": (STEP, {"fngraph.report"}),  # likewise
    "fngraph.__main__": (LOWER, {"fngraph.report"}),  # a command: python -m fngraph
    "fngraph.shadow": (SHADOW, set()),
    "fngraph.graphified": (TRANSFORMS, set()),
    "fngraph.checking": (TRANSFORMS, set()),
    "fngraph.rehearsing": (TRANSFORMS, set()),
    "fngraph.encoder": (TRANSFORMS, set()),
    "fngraph.testing": (TRANSFORMS | {"fngraph", "fngraph.testing"}, set()),
    "fngraph.report": (TRANSFORMS | {"fngraph", "fngraph.report"}, {"rich", "matplotlib"}),
    "fngraph.integrations": (
        TRANSFORMS | {"fngraph", "fngraph.integrations", "fngraph.models.serving"},
        {"transformers", "vllm"},
    ),
    "fngraph": (set(), set()),  # lazy: loads nothing but what `import_module` is asked for
}
PICTURES = {"rich", "matplotlib"}
CLIENTS = ("models", "benchmarks", "notebooks")


class Import(NamedTuple):
    """One imported module, and whether the statement runs only when a function is called."""

    module: str
    line: int
    lazy: bool


@functools.cache  # the planted ones look at all the others again and again
def imports(source: str, package: str) -> tuple[Import, ...]:
    """What `source`, a module inside of `package`, imports; not under `if TYPE_CHECKING`."""

    def walk(node: ast.AST, lazy: bool) -> Iterator[Import]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, lazy) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            up = package.split(".")[: -(node.level - 1) or None] if node.level else []
            base = ".".join([*up, *([node.module] if node.module else [])])
            yield from (Import(f"{base}.{a.name}", node.lineno, lazy) for a in node.names)
        inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, lazy or inside)

    return tuple(walk(ast.parse(source), False))


def is_under(module: str, allowed: set[str]) -> bool:
    """`torch.fx` is under `torch`; nothing but itself is under bare `fngraph`."""
    return any(
        module == name or (name != "fngraph" and module.startswith(f"{name}.")) for name in allowed
    )


def layer_of(module: str) -> str:
    """`fngraph.core.trees` is in `fngraph.core`."""
    return ".".join(module.split(".")[:2])


def library_violations(root: Path) -> list[str]:
    """Imports inside `root/fngraph` that the table does not allow."""
    found = []
    for path in sorted((root / "fngraph").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        package = module if is_package else ".".join(parts[:-1])
        layer = layer_of(module)
        if layer not in LAYERS:
            found.append(f"{module} is in no layer of DESIGN.md")
            continue
        anywhere, lazily = LAYERS[layer]
        for name, line, lazy in imports(path.read_text(), package):
            if name.partition(".")[0] in STDLIB or is_under(name, anywhere):
                continue
            if not (lazy and is_under(name, lazily)):
                found.append(f"{path.relative_to(root)}:{line}: {module} imports {name}")
    return found


def client_sources(root: Path) -> Iterator[tuple[Path, str]]:
    """Python of models, benchmarks and notebooks."""
    for client in CLIENTS:
        for path in sorted((root / client).rglob("*.py")):
            yield path, path.read_text()
        for path in sorted((root / client).rglob("*.ipynb")):
            cells = json.loads(path.read_text())["cells"]
            code = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
            lines = "\n".join(code).splitlines()
            yield path, "\n".join(s for s in lines if not s.lstrip().startswith(("%", "!")))


@functools.cache
def not_as_fg(source: str) -> tuple[tuple[int, str], ...]:
    """Lines that import fngraph other than by `import fngraph as fg`, and what they name.

    `fngraph.models` is a client itself, and clients may share its modules.
    """
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            plain = [(a.name, a.asname) for a in node.names if a.name.startswith("fngraph")]
            names = [name for name, alias in plain if (name, alias) != ("fngraph", "fg")]
            found += [(node.lineno, name) for name in names]
        elif isinstance(node, ast.ImportFrom) and is_under(node.module or "", {"fngraph.models"}):
            continue
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fngraph"):
            found.append((node.lineno, f"{node.module}"))
    return tuple(found)


def client_violations(root: Path) -> list[str]:
    """Imports of fngraph other than `import fngraph as fg`."""
    return [
        f"{path.relative_to(root)}:{line}: imports {name}"
        for path, source in client_sources(root)
        for line, name in not_as_fg(source)
    ]


def picture_violations(root: Path) -> list[str]:
    """Imports of rich or matplotlib outside of fngraph/report and the clients."""
    found = []
    for path in sorted((root / "fngraph").rglob("*.py")):
        where = path.relative_to(root)
        if where.parts[1] != "report":
            found += [
                f"{where}:{line}: imports {name}"
                for name, line, _ in imports(path.read_text(), "fngraph")
                if name.partition(".")[0] in PICTURES
            ]
    return found


def all_violations(root: Path) -> list[str]:
    """Everything that is wrong with the imports under `root`."""
    return library_violations(root) + client_violations(root) + picture_violations(root)


def loaded_by(statement: str, root: Path = ROOT) -> set[str]:
    """Top-level modules that a new Python has loaded after `statement`."""
    code = f"{statement}\nimport sys; print(*{{m.partition('.')[0] for m in sys.modules}})"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(root)},
        cwd=root,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return set(ran.stdout.split())


# everything that core can do: load each module, decide something, flatten a struct
USE_CORE = """
import importlib, pkgutil, fngraph.core as core
for m in pkgutil.walk_packages(core.__path__, "fngraph.core."):
    importlib.import_module(m.name)
limits = core.Limits(8, 4)
table = core.build_table("FULL_AND_PIECEWISE", core.ladders((1, 2, 4, 8), (1,), 4), limits)
core.explain(table, core.BatchSpec(3, 3, query_len=1)).as_text(), table.as_text()
core.resolve("FULL", {"a": core.Support.UNIFORM_BATCH}, limits=limits).as_text()
@core.struct
class Batch:
    ids: object = core.buffer("T", "int64")
    spec: object = core.host()
core.trees.flatten({"a": [1, None]})
"""


# --- the tree as it is ----------------------------------------------------------------------------


def test_the_library_keeps_to_its_layers():
    assert library_violations(ROOT) == []


def test_models_benchmarks_and_notebooks_import_fngraph_as_fg_alone():
    assert client_violations(ROOT) == []


def test_pictures_stay_in_report():
    assert picture_violations(ROOT) == []


@pytest.mark.parametrize(
    "statement",
    ["import fngraph", "import fngraph.core", "import fngraph.errors",
     "import fngraph as fg; fg.BatchSpec(4, 2), fg.Limits(8, 4), dir(fg)"],
)  # fmt: skip
def test_torch_and_optree_stay_out_of_light_imports(statement: str):
    assert not loaded_by(statement) & {"torch", "optree", "numpy", "einops", "rich"}


def test_torch_stays_out_whatever_core_does():
    loaded = loaded_by(USE_CORE)
    assert "optree" in loaded  # the code above got as far as flattening
    assert not loaded & {"torch", "numpy", "einops", "rich"}


# --- the checks, checked --------------------------------------------------------------------------


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of what the checks look at."""
    for name in ("fngraph", *CLIENTS):
        if (ROOT / name).exists():
            shutil.copytree(
                ROOT / name,
                tmp_path / name,
                symlinks=True,  # fngraph/models is one
                ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"),
            )
    return tmp_path


def test_a_copy_is_as_clean_as_the_tree(copy: Path):
    assert all_violations(copy) == found_in_the_tree()


@functools.cache
def found_in_the_tree() -> list[str]:
    """What is wrong as it is: nothing, one hopes."""
    return all_violations(ROOT)


LAZILY = "def lazily():\n    {}\n"
PLANTED = {
    "torch in core": ("fngraph/core/dispatching.py", "import torch"),
    "torch in core, inside a function": (
        "fngraph/core/trees.py", LAZILY.format("import torch")
    ),
    "torch in errors": ("fngraph/errors.py", "from torch import Tensor"),
    "numpy in core": ("fngraph/core/spec.py", "import numpy as np"),
    "optree in core, at import": ("fngraph/core/structs.py", "import optree"),
    "core above itself": ("fngraph/core/table.py", "from fngraph.ops import attention"),
    "core through the front door": ("fngraph/core/table.py", "import fngraph as fg"),
    "errors import core": ("fngraph/errors.py", "from fngraph.core import Mode"),
    "ops know fx": ("fngraph/ops/backend.py", "from fngraph.fx.tracing.tracer import trace"),
    "ops know graphs": ("fngraph/ops/primitives.py", "import fngraph.graphs.tape.recorder"),
    "fx knows graphs": ("fngraph/fx/pieces/cuts.py", "from fngraph import graphs"),
    "torch's facts know core": ("fngraph/torch_facts/memory.py", "import fngraph.core"),
    "fx knows ops": ("fngraph/fx/leaves.py", LAZILY.format("from fngraph.ops import PRIMITIVES")),
    "fx knows ops, relatively": ("fngraph/fx/modules.py", "from ..ops import PRIMITIVES"),
    "graphs know fx": ("fngraph/graphs/replay.py", "from fngraph.fx.pieces.cuts import Cut"),
    "graphs know stages": ("fngraph/graphs/replay.py", "from fngraph.stages import Compiled"),
    "compiled pieces know graphs": (
        "fngraph/compile/piece.py", "from fngraph.graphs.replay import Replay"
    ),
    "stages know graphify": ("fngraph/stages.py", "from fngraph.graphified import graphify"),
    "rich outside of report": ("fngraph/step/step.py", LAZILY.format("import rich.progress")),
    "matplotlib in core": ("fngraph/core/table.py", LAZILY.format("import matplotlib.pyplot")),
    "rich at report's import": ("fngraph/report/progress.py", "import rich"),
    "transformers at import": ("fngraph/integrations/transformers/fixed.py", "import transformers"),
    "a module of no layer": ("fngraph/utils.py", "x = 1"),
    "the front door is heavy": ("fngraph/__init__.py", "from fngraph.tracing import like"),
    "models reach in": ("models/families/llama.py", "from fngraph.core import trees"),
    "models reach in by module": ("models/families/llama.py", "import fngraph.core"),
    "models use another alias": ("models/families/llama.py", "import fngraph"),
    "benchmarks reach in": ("benchmarks/x.py", "from fngraph import graphify"),
}  # fmt: skip


@pytest.mark.sampled(15)
@pytest.mark.parametrize("what", PLANTED)
def test_a_planted_import_is_seen(copy: Path, what: str):
    where, line = PLANTED[what]
    path = copy / where
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.write(f"\n{line}\n")
    new = [v for v in all_violations(copy) if v not in found_in_the_tree()]
    module = where.removesuffix(".py").replace("/", ".")
    assert len(new) >= 1 and all(where in v or module in v for v in new)


def test_a_planted_type_checking_import_is_not_held_against_anyone(copy: Path):
    with (copy / "fngraph/core/table.py").open("a") as file:
        file.write("\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n")
    assert all_violations(copy) == found_in_the_tree()


@pytest.mark.parametrize("hidden", ["import torch", '__import__("torch")'])
def test_a_planted_torch_is_seen_at_run_time(copy: Path, hidden: str):
    stub = copy / "torch"
    stub.mkdir()
    (stub / "__init__.py").touch()  # the real one takes seconds to load
    assert "torch" not in loaded_by("import fngraph.core", copy)
    with (copy / "fngraph/core/dispatching.py").open("a") as file:
        file.write(f"\n{hidden}\n")
    assert "torch" in loaded_by("import fngraph.core", copy)


def test_a_planted_torch_inside_a_function_of_core_is_seen_at_run_time(copy: Path):
    stub = copy / "torch"
    stub.mkdir()
    (stub / "__init__.py").touch()
    path = copy / "fngraph/core/trees.py"
    text = path.read_text()
    assert text.count("\ndef flatten(") == 1
    planted = text.replace('    """Leaves and structure.', '    import torch\n    """Leaves and')
    assert planted != text
    path.write_text(planted)
    assert "torch" in loaded_by(USE_CORE, copy)
