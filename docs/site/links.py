"""Links between files of the clone, as a code host follows them, become links between pages.

README.md is the first page. A linked file that is no page, such as a model's source, gets one.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
HEAD = "---\nsearch:\n  exclude: true\n---\n"
MADE = "reference/"  # pages of no file


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the first page, and one for each linked file that is none."""
    readme = (ROOT / "README.md").read_text()
    files.append(File.generated(config, "index.md", content=readme))
    for file in list(files.documentation_pages()):
        if file.src_uri.startswith(MADE):
            continue
        for target, _ in LINK.findall(file.content_string):
            path = _in_clone(file.src_uri, target)
            if path is None or (page := _page_of(path)).partition("/")[0] != "source":
                continue
            if page not in files.src_uris:
                text = f"{HEAD}# {path.rpartition('/')[2]}\n\n`{path}`\n\n{_shown(ROOT / path)}"
                files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to files into links to their pages."""
    source = page.file.src_uri

    def turned(found: re.Match[str]) -> str:
        path = _in_clone(source, found[1])
        if path is None:
            return found[0]  # strict mode says what it thinks of it
        return posixpath.relpath(_page_of(path), posixpath.dirname(source)) + (found[2] or "")

    return markdown if source.startswith((MADE, "source/")) else LINK.sub(turned, markdown)


def _in_clone(source: str, target: str) -> str | None:
    """The file that a page's link leads to, from the clone's root; None if there is none."""
    if source == "index.md":
        folder = ""
    elif source.startswith("notebooks/"):
        folder = "notebooks"
    else:
        folder = posixpath.join("docs", posixpath.dirname(source))
    path = posixpath.normpath(posixpath.join(folder, target))
    return path if (ROOT / path).is_file() else None


def _page_of(path: str) -> str:
    """The page of a file of the clone."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/") and path.endswith(".md"):
        return path.removeprefix("docs/")
    if path.startswith("notebooks/"):
        return str(PurePosixPath(path).with_suffix(".md"))
    return f"source/{path}.md"


def _shown(path: Path) -> str:
    """The whole of a file, as a block of code."""
    kind = {".py": "python", ".md": "markdown", ".json": "json"}.get(path.suffix, "text")
    return f"``````{kind}\n{path.read_text().rstrip()}\n``````\n"
