"""A run of training in a process of its own, which dies at the worst of moments."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fngraph.models import llama, train
from fngraph.models.weights import checkpoint
from tests.ranks.starting import die

TEXT = b"".join(
    b"The quick brown fox %d jumps over %d lazy dogs.\n" % (i, i * i) for i in range(60)
)
CONFIG = llama.Config(
    vocab_size=256, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, dim=16, mlp_dim=24,
    tied=True,
)  # fmt: skip


def main(rank: int, words: list[str], where: str, nth: int) -> None:
    """`train.main`, killed at the nth time that it comes by a place; nowhere: it ends."""
    train.corpus = lambda: (TEXT, TEXT[:200])  # type: ignore[assignment]
    train.tiny_bytes = lambda: CONFIG
    train.card = lambda *args: ""  # type: ignore[assignment]
    train.draw_losses = lambda *args: None  # type: ignore[assignment]
    left = [nth]

    def is_due() -> bool:
        left[0] -= 1
        return left[0] == 0

    sync, replace, batch_at = os.fsync, Path.replace, train.batch_at

    def synced(fd: int) -> None:
        if where == "half written" and is_due():
            os.ftruncate(fd, os.fstat(fd).st_size // 2)
            die()
        sync(fd)

    def moved(path: Path, target: Any) -> Path:
        if where == "before the move" and is_due():
            die()
        new = replace(path, target)
        if where == "after the move" and is_due():
            die()
        return new

    def read(*args: Any) -> Any:
        if where == "in a step" and is_due():
            die()
        return batch_at(*args)

    checkpoint.os.fsync, checkpoint.Path.replace = synced, moved  # type: ignore[assignment]
    train.batch_at = read
    train.main(words)
