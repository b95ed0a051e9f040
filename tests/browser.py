"""Pages in headless Chromium, as wide as a phone or as a screen.

Pages are frames of one window, as a window of its own is never as narrow as a phone. They come from
a server on this machine alone. What a page says on its console, and what it asks for and does not
get, fails.
"""

from __future__ import annotations

import contextlib
import functools
import html
import http.server
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

PHONE, SCREEN = 390, 1280
LOADED = """
const found = [], frames = [...document.querySelectorAll("iframe")];
frames.forEach((frame, i) => frame.addEventListener("load", () => {
  found[i] = frame.contentWindow.eval(document.querySelector("template").content.textContent);
  if (Object.keys(found).length === frames.length) document.title = JSON.stringify(found);
}));
"""


class View(NamedTuple):
    """A page, by its path under the folder, and how many pixels wide it is shown."""

    page: str
    width: int


def chromium() -> str:
    """The browser; without one the test is skipped, or fails in CI."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        if os.environ.get("CI"):
            pytest.fail("chromium is missing: apt-get install chromium")
        pytest.skip("no chromium here: apt-get install chromium")
    return found


def looked_at(
    folder: Path, views: Sequence[View], look: str, profile: Path, dark: bool = False
) -> list[Any]:
    """What JavaScript finds in each page, once it and its pictures are there.

    Args:
        folder: what is served.
        look: a script run in each page, whose last expression is the answer: a value of JSON.
        profile: an empty folder of the browser's own.
        dark: whether pages are asked to be.
    """
    program = chromium()
    frames = "".join(
        f'<iframe src="/{view.page}" style="border: 0; width: {view.width}px; height: 900px">'
        "</iframe>"
        for view in views
    )
    window = (
        '<!doctype html><meta name="color-scheme" content="light dark">'
        f'<link rel="icon" href="data:,"><title></title><template>{html.escape(look)}</template>'
        f"{frames}<script>{LOADED}</script>"
    )
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    with _served(folder, window) as address:
        ran = subprocess.run(
            [program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
             f"--user-data-dir={profile}", "--enable-logging=stderr", "--window-size=1400,1000",
             *scheme, "--virtual-time-budget=5000", "--dump-dom", address],
            capture_output=True, text=True, timeout=200,
        )  # fmt: skip
    check_console(ran.stderr)
    title = re.search(r"<title>(.*?)</title>", ran.stdout)
    assert title is not None and title[1], ran.stderr
    found: list[Any] = json.loads(html.unescape(title[1]))
    return found


def check_console(said: str) -> None:
    """Assert that no page had anything to say."""
    assert "CONSOLE" not in said, said


@contextlib.contextmanager
def _served(folder: Path, window: str) -> Iterator[str]:
    """The address of the window, while it and the folder are served."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/window":
                super().do_GET()
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(window.encode())

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    handler = functools.partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/window"
        finally:
            server.shutdown()
