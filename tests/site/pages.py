"""Blocks of Python in README and the docs, each run alone, and what it prints.

    python tests/site/pages.py docs/first_hour.md ...     # writes what the blocks print below them

A block that begins with `# NAME.py` is that file, for blocks that import it. A block of text right
below one of Python is what it prints, times aside.
"""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"```python\n(?P<code>.*?)```\n(?:\n```text\n(?P<printed>.*?)```\n)?", re.DOTALL)


class Block(NamedTuple):
    """One block; `name` is a file's, `printed` what the page says that it prints."""

    page: str
    number: int
    name: str
    code: str
    printed: str | None


def blocks_of(path: Path) -> list[Block]:
    """The blocks of a page."""
    found = []
    for i, match in enumerate(BLOCK.finditer(path.read_text())):
        named = re.match(r"# (\w+\.py)\n", match["code"])
        name = named[1] if named else f"{path.stem.lower()}_{i}.py"
        found.append(Block(path.stem, i, name, match["code"], match["printed"]))
    return found


def pages() -> list[Path]:
    """README and the pages of the docs."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def printed_by(block: Block, folder: Path, files: Mapping[str, str]) -> str:
    """What a block prints that runs as a script of its own, in a folder with the named files."""
    for name, code in {**files, block.name: block.code}.items():
        (folder / name).write_text(code)
    mine = {Path(name).stem for name in files} | {Path(block.name).stem}
    with contextlib.redirect_stdout(io.StringIO()) as out, _in(folder, mine):
        runpy.run_path(block.name, run_name="__main__")
    return out.getvalue()


def files_of(blocks: list[Block]) -> dict[str, str]:
    """The files that named blocks are."""
    return {b.name: b.code for b in blocks if b.code.startswith(f"# {b.name}\n")}


def without_times(text: str) -> str:
    """A text without what another run or machine has otherwise: a mark for each fraction that is no
    percentage, and tables without their widths and the order of their rows, which go by those."""
    text = re.sub(r"-?\d+\.\d*(?![\d%])(?:e[+-]?\d+)?|-?\d+e[+-]\d+", "#", text)
    text = re.sub(r"-+:?(?=\|)", "-", re.sub(r" +", " ", text)).strip()
    return re.sub(r"(?m)(^\|[ -].*\|$\n\|-.*\|$\n?)((?:^\|.*\|$\n?)+)", _sorted_rows, text)


def _sorted_rows(table: re.Match[str]) -> str:
    """A table's head, and its rows in an order that is no matter of time."""
    return table[1] + "\n".join(sorted(table[2].splitlines())) + "\n"


@contextlib.contextmanager
def _in(folder: Path, modules: set[str]) -> Iterator[None]:
    """Work there, and forget the modules afterwards."""
    before = sys.path[:]
    sys.path.insert(0, str(folder))
    try:
        with contextlib.chdir(folder):
            yield
    finally:
        sys.path[:] = before
        for name in modules:
            sys.modules.pop(name, None)


def write(path: Path, folder: Path) -> None:
    """Put what each block prints below it, where the page shows that."""
    files = files_of([b for page in pages() for b in blocks_of(page)])
    found = iter([printed_by(block, folder, files) for block in blocks_of(path)])

    def shown(match: re.Match[str]) -> str:
        printed = next(found)
        if match["printed"] is None:
            return match[0]
        return f"```python\n{match['code']}```\n\n```text\n{printed.strip()}\n```\n"

    path.write_text(BLOCK.sub(shown, path.read_text()))


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as made:
        for argument in sys.argv[1:]:
            write(Path(argument), Path(made))
