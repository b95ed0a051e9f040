"""Small text tables: what every `as_text` of core is made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table, padded so that it also reads as plain text. Numbers align right."""
    cells = [[str(cell) for cell in row] for row in rows]
    columns = list(zip(header, *cells)) if cells else [(name,) for name in header]
    widths = [max(map(len, column)) for column in columns]
    right = [bool(cells) and all(map(_number, column[1:])) for column in columns]

    def line(row: Sequence[str]) -> str:
        padded = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right))
        return f"| {' | '.join(padded)} |"

    rule = "|".join("-" * (width + 1) + (":" if r else "-") for width, r in zip(widths, right))
    return "\n".join([line(header), f"|{rule}|", *map(line, cells)])


def _number(cell: str) -> bool:
    return cell.replace(".", "", 1).replace("%", "", 1).isdigit()


def ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers with their even runs folded: `1, 2, 4, 8..256 by 8`."""
    rest, parts = list(numbers), []
    while rest:
        step = rest[1] - rest[0] if len(rest) > 1 else 0
        run = 1
        while run < len(rest) and rest[run] - rest[run - 1] == step:
            run += 1
        if run < 4:  # a fold must be shorter than what it folds
            run = 1
            parts.append(f"{rest[0]}")
        else:
            parts.append(f"{rest[0]}..{rest[run - 1]}" + (f" by {step}" if step != 1 else ""))
        rest = rest[run:]
    return ", ".join(parts)


def count(number: int, noun: str) -> str:
    """`1 key`, `2 keys`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
