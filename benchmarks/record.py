"""What a figure is worth nothing without: device, driver, software, command and date, as JSON."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch


def environment() -> dict[str, str]:
    """The machine and the software, as far as a figure depends on them."""
    found = {
        "device": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": _command(),
        "date": datetime.date.today().isoformat(),
    }
    if torch.cuda.is_available():
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout
        found |= {"device": torch.cuda.get_device_name(), "driver": driver.split("\n")[0]}
    return found


def _command() -> str:
    """What was typed, without the file that the figures go to."""
    words = [Path(sys.argv[0]).parent.name, *sys.argv[1:]]
    if "--json" in words:
        at = words.index("--json")
        del words[at : at + 2]
    return "python -m " + " ".join(words)


def write(path: Path, figures: Any) -> None:
    """Figures with their environment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"environment": environment(), "figures": figures}, indent=1) + "\n")


def median_ms(fn: Callable[[], Any], repeats: int, *, warm_up: int = 5) -> float:
    """Median wall time of `fn` with everything that it launched finished, in ms."""
    times = []
    for i in range(warm_up + repeats):
        began = time.perf_counter()
        fn()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if i >= warm_up:
            times.append(time.perf_counter() - began)
    return median(times) * 1e3
