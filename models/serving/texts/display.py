"""Texts as they grow, above a progress bar (rich)."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column, Table
from rich.text import Text

from fngraph.models.serving.loop import Served
from fngraph.models.serving.requests import Request, State
from fngraph.models.text import Decode, to_text


def show(
    served: Iterable[Served], state: State, console: Console, *, transient: bool = False,
    decode: Decode = to_text,
) -> Generator[Served, None, None]:  # fmt: skip
    """Pass steps through while the texts grow on a terminal; at the end each is printed whole, and
    why, where it failed.

    Of what `transient` shows nothing is left at the end.

    Args:
        state: before the first step, with every request waiting.
    """
    columns = (
        TextColumn("tokens"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:.0f}/s"),
    )
    bar = Progress(*columns, console=console)
    requests = [job.request for job in state.waiting]
    grown: dict[int, list[int]] = {request.id: [] for request in requests}
    failed: dict[int, str] = {}
    seconds, task = 0.0, bar.add_task("", total=sum(r.max_new for r in requests), rate=0)
    look = Group(texts(requests, grown, decode), bar)
    try:
        with Live(look, console=console, refresh_per_second=8, transient=True) as live:
            for one in served:
                for event in one.events:
                    grown[event.id] += event.tokens
                    if event.failed:
                        failed[event.id] = f" ({event.end})"
                done, seconds = sum(map(len, grown.values())), seconds + one.seconds
                bar.update(task, completed=done, rate=done / seconds)
                live.update(Group(texts(requests, grown, decode), bar))
                yield one
    finally:  # what there is, of a run that was stopped too
        if not transient:
            for request in requests:
                line = Text(f"{request.id} ").append(whole(request, grown[request.id], decode))
                line.append(failed.get(request.id, ""))
                console.print(line, soft_wrap=True)  # as long as it is
            console.print(bar)


def texts(
    requests: Sequence[Request], grown: Mapping[int, Sequence[int]], decode: Decode = to_text
) -> Table:
    """Every request: its prompt, then what it got so far."""
    table = Table.grid(Column(), Column(overflow="fold"), padding=(0, 1))
    for request in requests:
        table.add_row(f"{request.id}", whole(request, grown[request.id], decode))
    return table


def whole(request: Request, new: Sequence[int], decode: Decode = to_text) -> Text:
    """`prompt => answer`, in bold from the arrow on; what stopped it is left out."""
    ends = (len(run) for run in request.stop if tuple(new[-len(run) :]) == run)
    answer = decode(new[: len(new) - max(ends, default=0)])
    heeded = len(decode(new[: request.min_tokens])) if request.min_tokens else 0
    cuts = [at for stop in request.stop_strings if (at := answer.find(stop, heeded)) >= 0]
    answer = answer[: min(cuts)] if cuts else answer
    return Text(f"{decode(request.prompt)} ").append(f"=> {answer}", style="bold")
