"""python -m benchmarks NAME [flags]: run one benchmark; without a name, list them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

NAMES = sorted(
    p.stem
    for p in Path(__file__).parent.glob("*.py")
    if p.stem not in ("device", "peers", "record") and "_" not in p.stem
)


def main(argv: list[str]) -> int:
    """The named module's own `main`."""
    if not argv or argv[0] not in NAMES:
        print("python -m benchmarks", " | ".join(NAMES))
        return 2
    return importlib.import_module(f"benchmarks.{argv[0]}").main(argv[1:]) or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
