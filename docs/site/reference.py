"""A page for each public module, with every public name of it, read from the code by griffe.

Nothing is imported, so that neither torch nor a device is needed. A name is public as the module
says: `__all__`, or `_EXPORTS` and `_MODULES` where names come in when they are first asked for, or
`import x as x`; and what a module that says none of these defines itself.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
FIRST = "fngraph"
DEEPER = ("integrations.transformers",)  # public, below a module that only lists it


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the modules where nav says `reference/`."""
    for section in config.nav:
        for title, page in section.items():
            if page == "reference/":
                pages = [{name: _page(name)} for name in modules()]
                section[title] = [{"All names": "reference/index.md"}, *pages]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    files.append(File.generated(config, "reference/index.md", content=index()))
    for module in modules():
        files.append(File.generated(config, _page(module), content=page_of(module)))
    return files


@functools.cache
def package() -> griffe.Module:
    """The whole of fngraph, as griffe reads it."""
    paths = [str(ROOT)]
    loaded = griffe.load(
        FIRST, search_paths=paths, allow_inspection=False, docstring_parser="google"
    )
    assert isinstance(loaded, griffe.Module)
    return loaded


def modules() -> list[str]:
    """Public modules, the first of them fngraph itself."""
    below = [name for name in names_of(FIRST) if _is_module(FIRST, name)]
    return [FIRST, *(f"{FIRST}.{name}" for name in (*below, *DEEPER))]


def names_of(module: str) -> list[str]:
    """Public names of a module, in the order of the file that lists them."""
    path = ROOT / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(path.read_text())
    lists = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    listed = lists.get("__all__")
    if isinstance(listed, ast.List):
        return [str(ast.literal_eval(item)) for item in listed.elts]
    if "_EXPORTS" in lists:
        return [*ast.literal_eval(lists["_EXPORTS"]), *ast.literal_eval(lists["_MODULES"])]
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    again = [alias.name for n in imports for alias in n.names if alias.asname == alias.name]
    if again or path.name == "__init__.py":
        return again or [
            alias.name for n in imports for alias in n.names if (n.module or "").startswith(FIRST)
        ]
    own = (ast.FunctionDef, ast.ClassDef)
    return [n.name for n in tree.body if isinstance(n, own) and not n.name.startswith("_")]


def page_of(module: str) -> str:
    """The page of one module."""
    own, inner = [], []
    for name in names_of(module):
        is_page = f"{module}.{name}" in modules()
        (inner if is_page else own).append(name)
    lines = [f"# `{module}`", "", _first_paragraph(package(), module), ""]
    if inner:
        links = ", ".join(f"[`{module}.{n}`]({_page(f'{module}.{n}')[10:]})" for n in inner)
        lines += [f"Modules: {links}.", ""]
    for name in own:
        lines += [f"::: {module}.{name}", ""]
    return "\n".join(lines)


def index() -> str:
    """All names, each with the first line of its docstring."""
    lines = ["# All public names", ""]
    for module in modules():
        lines += [f"## [`{module}`]({_page(module)[10:]})", "", "| | |", "|---|---|"]
        for name in names_of(module):
            path = f"{module}.{name}"
            link = f"({_page(path)[10:]})" if path in modules() else f"[{path}]"
            lines.append(f"| [`{name}`]{link} | {_summary(path)} |")
        lines.append("")
    return "\n".join(lines)


def _page(module: str) -> str:
    return f"reference/{module}.md"


def _is_module(module: str, name: str) -> bool:
    folder = ROOT / module.replace(".", "/")
    return (folder / name).is_dir() or (folder / f"{name}.py").is_file()


def _object(path: str) -> griffe.Object | griffe.Alias:
    return package()[path.removeprefix(f"{FIRST}.")] if path != FIRST else package()


def _summary(path: str) -> str:
    docstring = _object(path).docstring
    text = docstring.value.split("\n\n")[0] if docstring is not None else ""
    return " ".join(text.split()).replace("|", "\\|").replace("[", "\\[")


def _first_paragraph(root: griffe.Module, module: str) -> str:
    docstring = _object(module).docstring
    return docstring.value if docstring is not None else ""
