"""The public surface: every name resolves, says what it is, and is where it claims to be."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fngraph
import fngraph as fg
from fngraph.graphified import Bound, Graphified

ROOT = Path(__file__).parent.parent
STAGES = ("Traced", "Split", "Lowered", "Compiled", "Step")


def in_new_python(code: str) -> str:
    """What `code` prints in a Python that has loaded nothing of ours yet."""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip()


@pytest.mark.parametrize("name", fngraph.__all__)
def test_a_public_name_resolves_and_has_a_docstring(name: str):
    value = getattr(fngraph, name)
    assert inspect.getdoc(value), f"fngraph.{name} has no docstring"
    assert value.__doc__ != dict.__doc__
    if not isinstance(value, ModuleType):
        assert value.__module__.startswith("fngraph."), value.__module__


def chains(path: Path) -> set[str]:
    """What a file reads of `fg`: "core.trees.flatten"."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names, x = [], node
        while isinstance(x, ast.Attribute):
            names.append(x.attr)
            x = x.value
        if names and isinstance(x, ast.Name) and x.id == "fg":
            found.add(".".join(reversed(names)))
    return found


@pytest.mark.sampled(0)
def test_modules_that_models_and_benchmarks_reach_through_fg_are_there_whoever_comes_first():
    """Nothing else need be imported before: each is asked for in a Python of its own."""
    files = [*(ROOT / "models").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    read = {tuple(chain.split(".")[:2]) for chain in set().union(*map(chains, files))}
    modules = sorted(
        x for x in read if len(x) > 1 and (ROOT / "fngraph" / x[0] / f"{x[1]}.py").exists()
    )
    assert ("core", "trees") in modules
    for names in modules:
        code = f"import fngraph; print(fngraph.{'.'.join(names)}.__name__)"
        assert in_new_python(code) == ".".join(("fngraph", *names))


@pytest.mark.parametrize("name", fngraph.core.__all__)
def test_a_public_name_of_core_resolves_and_has_a_docstring(name: str):
    assert inspect.getdoc(getattr(fngraph.core, name))


def public_members(cls: type) -> dict[str, Any]:
    """Methods and properties that `cls` itself defines, without underscore."""
    return {
        name: member
        for name, member in vars(cls).items()
        if not name.startswith("_")
        and (inspect.isfunction(member) or isinstance(member, property | classmethod))
    }


@pytest.mark.parametrize(
    "name", [*STAGES, "Limits", "Mode", "Encoder", "EncoderModel", "EncoderStats"]
)
def test_a_class_has_docstrings_on_all_that_is_public(name: str):
    cls = getattr(fngraph, name)
    members = public_members(cls)
    assert members
    bare = [m for m, value in members.items() if not inspect.getdoc(value)]
    assert bare == []


@pytest.mark.parametrize("cls", [Graphified, Bound])
def test_what_graphify_returns_has_docstrings_on_all_that_is_public(cls: type):
    assert inspect.getdoc(cls)
    assert [m for m, value in public_members(cls).items() if not inspect.getdoc(value)] == []


def test_what_prints_a_table_is_one_in_a_notebook():
    """Each class whose `as_text` makes a table shows that table."""
    seen, bare = 0, []
    for path in [*(ROOT / "fngraph").rglob("*.py"), *(ROOT / "models").rglob("*.py")]:
        for cls in ast.walk(ast.parse(path.read_text())):
            if isinstance(cls, ast.ClassDef):
                own = {f.name: ast.unparse(f) for f in cls.body if isinstance(f, ast.FunctionDef)}
                if "table(" in own.get("as_text", ""):
                    seen += 1
                    bare += [cls.name] if "html(" not in own.get("_repr_html_", "") else []
    assert seen > 15 and bare == []


def test_every_error_has_a_builtin_base_and_a_docstring():
    errors = [
        e
        for e in vars(fg.errors).values()
        if inspect.isclass(e) and e.__module__ == "fngraph.errors"
    ]
    assert len(errors) > 15
    for error in errors:
        assert issubclass(error, fg.errors.FnGraphError) and inspect.getdoc(error)
        builtins = [b for b in error.__mro__ if b.__module__ == "builtins"]
        assert error is fg.errors.FnGraphError or builtins[0] not in (Exception, object)


def test_dir_lists_what_can_be_had():
    listed = dir(fngraph)
    assert listed == sorted(listed) and set(fngraph.__all__) <= set(listed)


def test_dir_loads_nothing():
    code = "import sys, fngraph; dir(fngraph); print('torch' in sys.modules)"
    assert in_new_python(code) == "False"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'grafify'"):
        fngraph.grafify  # noqa: B018


@pytest.mark.sampled(0)
@pytest.mark.parametrize("first", ["from fngraph.checking import Report", "fg.integrations"])
def test_all_names_are_there_and_graphify_is_a_function_whatever_was_imported(first: str):
    """A module of the same name would take its place."""
    code = f"""
import fngraph as fg
{first}
made = []
for _ in range(2):
    f = fg.graphify(lambda params, cache, batch: None, donate="cache", stage="batch")
    decorator = fg.graphify(donate=1, stage=2)
    made += [type(f).__name__, type(decorator(lambda params, cache, batch: None)).__name__]
    import fngraph.graphified, fngraph.step.step, fngraph.stages
assert set(fg.__all__) <= set(dir(fg))
from fngraph import *
print(*made, set(fg.__all__) - set(dir()), graphify is fg.graphify)
"""
    assert in_new_python(code) == "Graphified " * 4 + "set() True"


def test_all_names_of_models_are_there():
    import fngraph.models as models

    missing = []
    for name in models._EXPORTS:
        try:
            getattr(models, name)
        except (ImportError, AttributeError) as error:
            missing.append(f"{name}: {error}")
    assert not missing and set(models._EXPORTS) <= set(dir(models))


def test_type_checkers_are_told_the_same_names():
    """`__getattr__` is hidden from them; what they read stands under `TYPE_CHECKING`."""
    tree = ast.parse((ROOT / "fngraph/__init__.py").read_text())
    (block,) = [n for n in tree.body if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n)]
    told = {
        alias.asname: f"{node.module}.{alias.name}"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    runs = {n: f"fngraph.{m}.{n}" for n, m in fngraph._EXPORTS.items()}
    runs |= {name: f"fngraph.{name}" for name in fngraph._MODULES}
    assert told == runs
