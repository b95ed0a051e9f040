"""Notebooks as pages: their text, code and stored outputs. Nothing is run here."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

FOLDER = Path(__file__).parents[2] / "notebooks"
PICTURES = {"image/png": "png", "image/svg+xml": "svg"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the notebooks where nav says `notebooks/`."""
    listed = [f"notebooks/{path.stem}.md" for path in sorted(FOLDER.glob("*.ipynb"))]
    for section in config.nav:
        (entries,) = section.values()
        for entry in entries if isinstance(entries, list) else ():
            for title, page in entry.items():
                entry[title] = listed if page == "notebooks/" else page
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each notebook, and its pictures."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        text, pictures = page_of(json.loads(path.read_text()), path.stem)
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
        for name, content in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def page_of(notebook: Mapping[str, Any], stem: str) -> tuple[str, dict[str, bytes]]:
    """Markdown of a notebook, and its pictures by name."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        elif source.strip():
            parts.append(f"```python\n{source.rstrip()}\n```")
            for output in cell["outputs"]:
                parts += _printed(output, stem, pictures)
    return "\n\n".join(parts) + "\n", pictures


def _printed(output: Mapping[str, Any], stem: str, pictures: dict[str, bytes]) -> list[str]:
    """One output, as Markdown; a picture is added to `pictures`."""
    if output["output_type"] == "stream":
        return _text(output["text"])
    data = output.get("data", {})
    for kind, suffix in PICTURES.items():
        if kind in data:
            name = f"{stem}_{len(pictures)}.{suffix}"
            raw = "".join(data[kind])
            pictures[name] = base64.b64decode(raw) if suffix == "png" else raw.encode()
            return [f'<div class="printed" markdown>![what the cell draws]({name})</div>']
    if "text/html" in data:
        return [f'<div class="printed">\n{"".join(data["text/html"]).strip()}\n</div>']
    return _text(data.get("text/plain", ""))


def _text(text: str | list[str]) -> list[str]:
    whole = "".join(text).strip("\n")
    return [f"``````{{.text .printed}}\n{whole}\n``````"] if whole else []
