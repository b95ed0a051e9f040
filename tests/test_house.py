"""The house: no circle of imports, no way up in step/, rooms of a size, and no private doors.

What may import what is in test_layers.py. Imports for type checkers alone count here: a file that
needs another's names to be understood is not below it.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FRONT = "fngraph"  # its __init__ names what all layers have, for type checkers
STEP = (  # each from those before it
    "binding", "prepared", "changed_rows", "given", "rebind", "guards", "keys", "agreed", "capture",
    "untold", "host_batch", "call", "sleep", "times", "step",
)  # fmt: skip
MOST_ROOMS = 26  # that a folder shows at a time, files and folders; most show fewer than 15


@functools.cache
def modules() -> dict[str, Path]:
    """Module to file, of all that we ship and of the benchmarks."""
    found = {}
    for folder in ("fngraph", "models", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            found[f"fngraph.{name}" if folder == "models" else name] = path
    return found


def imported(source: str, module: str) -> set[str]:
    """Modules of ours that `source` imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {w if w in modules() else node.module for w in whole}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name in modules()} - {module, FRONT}


@functools.cache
def arrows() -> dict[str, set[str]]:
    """Each module with what it imports."""
    found = {name: imported(path.read_text(), name) for name, path in modules().items()}
    del found[FRONT]
    return found


def test_there_is_no_circle() -> None:
    graphlib.TopologicalSorter(arrows()).prepare()  # CycleError names one


@pytest.mark.parametrize(
    "statement", ["from fngraph.step.keys import Keys", "import fngraph.stages"]
)
def test_a_planted_circle_is_seen(statement: str) -> None:
    source = f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    {statement}\n"
    name = "fngraph.executable"
    planted = arrows() | {name: arrows()[name] | imported(source, name)}
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(planted).prepare()


def test_no_arrow_in_step_goes_up() -> None:
    prefix = "fngraph.step."
    rooms = {name.removeprefix(prefix) for name in modules() if name.startswith(prefix)}
    assert rooms == set(STEP)
    for name in rooms:
        below = {one.removeprefix(prefix) for one in arrows()[prefix + name] if prefix in one}
        assert below <= set(STEP[: STEP.index(name)]), name


def test_folders_show_few_rooms() -> None:
    counts = []
    for folder in {path.parent for path in modules().values()}:
        rooms = [p for p in folder.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()]
        shown = [p for p in rooms if not p.name.startswith("__")]
        assert len(shown) <= MOST_ROOMS, folder
        counts.append(len(shown))
    assert sum(n < 15 for n in counts) > 0.8 * len(counts), counts


def test_no_module_is_named_as_what_it_holds() -> None:
    """`from fngraph.x import y` would put the module where `fg.x` is the function."""
    for path in modules().values():
        held = {getattr(node, "name", None) for node in ast.parse(path.read_text()).body}
        assert path.stem not in held, path


# --- private doors --------------------------------------------------------------------------------

PUBLIC = {"_replace", "_asdict", "_fields", "_make"}  # of a NamedTuple
NO_OTHER_WAY = {  # torch's own private names, which a benchmark needs
    "torch._dynamo": "recompile_limit of flex",
    "torch.ops.aten._flash_attention_forward": "FlashAttention 2 without padding, to compare with",
    "torch.cuda._sleep": "keeps the device busy until all is launched",
}


def private(source: str) -> Iterator[str]:
    """Private attributes of others that `source` reads or writes."""
    tree = ast.parse(source)
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    own = {n.attr for n in names if isinstance(n.value, ast.Name) and n.value.id in ("self", "cls")}
    for node in names:
        if node.attr.startswith("_") and not node.attr.startswith("__"):
            if node.attr not in PUBLIC | own and ast.unparse(node) not in NO_OTHER_WAY:
                yield ast.unparse(node)


def clients() -> Iterator[tuple[str, str]]:
    """Sources of users: models, benchmarks, notebooks, and the blocks of README and docs."""
    for folder in ("models", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), path.read_text()
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text())["cells"]
        code = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
        yield path.name, re.sub(r"(?m)^\s*[%!].*$", "", code)
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for block in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL):
            yield path.name, block


def test_nobody_needs_a_private_name() -> None:
    assert [(where, name) for where, source in clients() for name in private(source)] == []


def test_a_private_name_would_be_seen() -> None:
    assert list(private("step._keys; self._own; spec._replace(); torch._C.x()")) == [
        "step._keys", "torch._C"
    ]  # fmt: skip


def test_every_file_that_a_source_names_is_there() -> None:
    """In backticks, from whatever folder: moved files leave such names behind."""
    there = [
        f"/{path.relative_to(ROOT)}"
        for folder in ("fngraph", "models", "benchmarks", "tests", "docs", "notebooks")
        for path in (ROOT / folder).rglob("*.*")
    ]
    lost = []
    for name in there:
        if name.endswith((".py", ".cu", ".cuh", ".c")):
            named = re.findall(
                r"`([\w./-]+\.(?:py|cuh?|c|md|ipynb))`", (ROOT / name[1:]).read_text()
            )
            gone = [x for x in named if not any(one.endswith(f"/{x}") for one in there)]
            lost += [(name, x) for x in gone]
    assert lost == []
