"""Texts as they grow, above a progress bar (rich)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from models.requests import Request, State
from models.serve import Served
from models.text import Decode, to_text


def show(
    served: Iterable[Served], state: State, console: Console, *, transient: bool = False,
    decode: Decode = to_text,
) -> Iterator[Served]:  # fmt: skip
    """Pass steps through while the texts grow on the console, above a progress bar.

    What `transient` shows is gone at the end; off a terminal, it shows nothing.

    Args:
        state: before the first step, with every request waiting.
    """
    columns = (
        TextColumn("tokens"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.speed:.0f}/s"),
    )
    bar = Progress(*columns, console=console)
    requests = [job.request for job in state.waiting]
    grown: dict[int, list[int]] = {request.id: [] for request in requests}
    task = bar.add_task("", total=sum(request.max_new for request in requests))
    look = Group(texts(requests, grown, decode), bar)
    with Live(look, console=console, refresh_per_second=8, transient=transient) as live:
        for one in served:
            for event in one.events:
                grown[event.id] += event.tokens
            bar.update(task, completed=sum(map(len, grown.values())))
            live.update(Group(texts(requests, grown, decode), bar))
            yield one


def texts(
    requests: Sequence[Request], grown: Mapping[int, Sequence[int]], decode: Decode = to_text
) -> Table:
    """Every request: its prompt, then what it got so far in bold."""
    table = Table.grid(padding=(0, 1))
    for request in requests:
        text = Text(decode(request.prompt)).append(decode(grown[request.id]), style="bold")
        table.add_row(f"{request.id}", text)
    return table
