"""Texts as they grow, above a progress bar (rich)."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from models.requests import Served, State
from models.text import Decode, to_text


def show(
    served: Iterator[Served], state: State, console: Console, *, transient: bool = False,
    decode: Decode = to_text,
) -> Iterator[Served]:  # fmt: skip
    """Pass steps through while the texts grow on the console, above a progress bar.

    What `transient` shows is gone at the end; off a terminal, it shows nothing.
    """
    columns = (
        TextColumn("tokens"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.speed:.0f}/s"),
    )
    bar = Progress(*columns, console=console)
    total = sum(request.max_new for request in state.requests)
    task = bar.add_task("", total=total)
    look = Group(texts(state, decode), bar)
    with Live(look, console=console, refresh_per_second=8, transient=transient) as live:
        for one in served:
            bar.update(task, completed=sum(len(r.generated) for r in one.state.requests))
            live.update(Group(texts(one.state, decode), bar))
            yield one


def texts(state: State, decode: Decode = to_text) -> Table:
    """Every request: its prompt, then its text in bold."""
    table = Table.grid(padding=(0, 1))
    for request in state.requests:
        text = Text(decode(request.prompt)).append(decode(request.generated), style="bold")
        table.add_row(f"{request.id}", text)
    return table
