"""The site: built without a network and without torch, whole in itself, drawn by a browser."""

from __future__ import annotations

import fcntl
import html.parser
import importlib
import os
import re
import subprocess
import sys
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fngraph
from tests.browser import PHONE, SCREEN, View, check_console, chromium, looked_at
from tests.site.pages import ROOT

CONFIG = ROOT / "docs/site/mkdocs.yml"
BUILD = """
import socket, sys
def refused(*args, **kwargs):
    raise OSError("the site is built without a network")
socket.socket.connect = socket.getaddrinfo = refused
sys.modules["torch"] = sys.modules["fngraph"] = None  # read, never imported
from mkdocs.__main__ import cli
cli()
"""
OUTSIDE = ("http:", "https:", "//")
LOADS = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src"}


@pytest.fixture(scope="session")
def site(compiled_once: Path) -> Path:
    """The folder of the site, built once for all processes of a run."""
    folder = compiled_once.parent / "site"
    with (compiled_once.parent / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "index.html").exists():
            ran = subprocess.run(
                [sys.executable, "-c", BUILD, "build", "--strict", "-f", CONFIG, "-d", folder],
                capture_output=True, text=True, cwd=ROOT,
                env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
            )  # fmt: skip
            assert ran.returncode == 0, ran.stdout + ran.stderr
    return folder


class Page(html.parser.HTMLParser):
    """What a page links to, loads, and can be linked to at."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Of one element."""
        given = dict(attrs)
        self.anchors |= {given[name] or "" for name in ("id", "name") if name in given}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"] or "")
        if given.get(LOADS.get(tag, "")) and given.get("rel") not in ("next", "prev"):
            self.loads.append(given[LOADS[tag]] or "")


def parsed(site: Path) -> dict[Path, Page]:
    """All pages of the site."""
    return {path: Page(path.read_text()) for path in sorted(site.rglob("*.html"))}


def broken(pages: dict[Path, Page]) -> Iterator[str]:
    """Links within the site, and what it loads, that lead nowhere."""
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # shown at any depth
        for link in [*page.links, *page.loads]:
            where = urllib.parse.urlsplit(link)
            if where.scheme or where.netloc:
                continue
            target = (path.parent / urllib.parse.unquote(where.path)).resolve()
            target = path if not where.path else target
            anchor = urllib.parse.unquote(where.fragment)
            if not target.is_file():
                yield f"{path.name}: {link}"
            elif anchor and target in pages and anchor not in pages[target].anchors:
                yield f"{path.name}: {link}, no such place"


@pytest.mark.sampled(0)
def test_every_link_and_anchor_leads_somewhere(site: Path) -> None:
    pages = parsed(site)
    assert len(pages) > 50 and sum(len(page.links) for page in pages.values()) > 5000
    assert list(broken(pages)) == []


def test_a_link_to_nowhere_would_be_seen(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text('<h1 id="a"></h1><a href="#a"></a><a href="#b"></a><img src="c.png">')
    assert list(broken(parsed(tmp_path))) == ["page.html: #b, no such place", "page.html: c.png"]


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for path, page in parsed(site).items():
        assert [load for load in page.loads if load.startswith(OUTSIDE)] == [], path
        assert "fonts.googleapis" not in path.read_text(), path
    for path in site.rglob("*.css"):
        loaded = re.findall(r"(?:url\(|@import )['\"]?(https?:|//)", path.read_text())
        assert loaded == [], path


def public_names() -> Iterator[str]:
    """Every public name, as Python has them."""
    for module in ("fngraph", *(f"fngraph.{name}" for name in fngraph._MODULES)):
        loaded: Any = importlib.import_module(module)
        names = getattr(loaded, "__all__", None) or getattr(loaded, "_EXPORTS", None)
        if names is None:  # it defines them itself
            names = [n for n, x in vars(loaded).items() if getattr(x, "__module__", "") == module]
        yield from (f"{module}.{name}" for name in names if not name.startswith("_"))


def test_the_reference_has_every_public_name(site: Path) -> None:
    folder = site / "reference"
    anchors = set().union(*(Page(p.read_text()).anchors for p in folder.glob("*.html")))
    modules = {path.stem for path in folder.glob("*.html")}
    names = list(public_names())
    assert len(names) > 200
    assert [name for name in names if name not in anchors | modules] == []


def test_the_reference_says_what_arguments_are(site: Path) -> None:
    text = re.sub(r"<[^>]+>", " ", (site / "reference/fngraph.html").read_text())
    for words in ("max_keys", "generators", "Raises"):
        assert words in text, words


LOOK = """
(() => {
  const wide = innerWidth, out = [];
  const inside = ["auto", "scroll", "hidden"];
  const scrolls = x => x && x !== document.body &&
    (inside.includes(getComputedStyle(x).overflowX) || scrolls(x.parentElement));
  for (const x of document.querySelectorAll("article *")) {
    const box = x.getBoundingClientRect();
    if (box.width && box.right > wide + 1 && !scrolls(x)) out.push(x.outerHTML.slice(0, 120));
  }
  const pictures = [...document.querySelectorAll("img")];
  return {wide, page: document.documentElement.scrollWidth, out,
    text: document.querySelector("article").innerText.length, pictures: pictures.length,
    missing: pictures.filter(x => !x.naturalWidth || x.getBoundingClientRect().width < 16).length};
})()
"""
PAGES = ("index.html", "first_hour.html", "reference/index.html", "reference/fngraph.html",
         "notebooks/01_batches_and_dispatch.html")  # fmt: skip


@pytest.mark.sampled(0)
def test_a_browser_draws_it_as_wide_as_a_phone_and_as_a_screen(site: Path, tmp_path: Path) -> None:
    views = [View(page, width) for page in PAGES for width in (PHONE, SCREEN)]
    for view, seen in zip(views, looked_at(site, views, LOOK, tmp_path / "profile")):
        assert seen["wide"] == view.width and seen["page"] <= view.width, (view, seen)
        assert seen["out"] == [] and seen["missing"] == 0 and seen["text"] > 2000, (view, seen)
        assert seen["pictures"] >= 3 * ("notebooks" in view.page), (view, seen)


def test_what_is_too_wide_or_not_drawn_would_be_seen(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(
        '<meta charset="utf-8"><article><p style="width: 700px">wide</p>'
        '<img src="data:image/png;base64,AAAA"></article>'
    )
    (seen,) = looked_at(tmp_path, [View("page.html", PHONE)], LOOK, tmp_path / "profile")
    assert seen["page"] > PHONE and seen["missing"] == 1 and len(seen["out"]) == 1


def test_a_page_opened_from_its_file_searches(site: Path, tmp_path: Path) -> None:
    ran = subprocess.run(
        [chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
         f"--user-data-dir={tmp_path}/profile", "--virtual-time-budget=8000", "--dump-dom",
         f"file://{site}/index.html?q=plan_sizes"],
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    check_console(ran.stderr)
    found = re.findall(r'href="([^"]*)" class="md-search-result__link"', ran.stdout)
    assert any("planned_sizes.html" in link for link in found), found
    assert any("reference/fngraph.core.html" in link for link in found), found
