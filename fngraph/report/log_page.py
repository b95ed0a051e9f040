"""A log as one HTML page that needs nothing else: charts as inline SVG, tables, light and dark, and
as narrow as a phone."""

from __future__ import annotations

from html import escape

from fngraph.core import Log
from fngraph.core.text import count
from fngraph.report.log_charts import KINDS, Chart, ChartBar, charts_of

WIDTH = 1000  # of a bar, in units that stretch to the page
SLOWEST = 10
STYLE = """
:root { color-scheme: light dark; --paper: #fbfbfa; --ink: #1c1c1a; --soft: #66645e;
  --line: #dddbd4; --track: #eeece6; --FULL: #1f5fa8; --PIECEWISE: #c96a12; --NONE: #85827a;
  --padding: #c9c5b9; --graph: #1f5fa8; --eager: #c96a12; --gap: #c9c5b9; --pool: #1f5fa8;
  --graphs: #4f9a5b; --ahead: #1f5fa8; --in-step: #b3382c; --loaded: #4f9a5b; }
@media (prefers-color-scheme: dark) { :root { --paper: #17181a; --ink: #e8e6e0; --soft: #a3a098;
  --line: #35363a; --track: #232529; --FULL: #6ea8e8; --PIECEWISE: #f0a254; --NONE: #9a978e;
  --padding: #55564f; --graph: #6ea8e8; --eager: #f0a254; --gap: #55564f; --pool: #6ea8e8;
  --graphs: #7cc78a; --ahead: #6ea8e8; --in-step: #ee7a6d; --loaded: #7cc78a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem 1rem 3rem; max-width: 60rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2.2rem 0 0; }
p { margin: .2rem 0 .6rem; color: var(--soft); }
.row { margin: .45rem 0; } .label { display: flex; justify-content: space-between; gap: 1rem;
  font-size: .86rem; } .note { color: var(--soft); text-align: right; }
svg.bar { display: block; width: 100%; height: 14px; background: var(--track); }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1rem; font-size: .86rem; }
.legend i { display: inline-block; width: .8em; height: .8em; margin-right: .4em; }
.scale { display: flex; justify-content: space-between; font-size: .8rem; color: var(--soft); }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .86rem; }
th, td { padding: .2rem .7rem .2rem 0; text-align: left; border-bottom: 1px solid var(--line);
  overflow-wrap: normal; white-space: nowrap; } td.n, th.n { text-align: right; }
"""


def page_of(log: Log) -> str:
    """The page, as text.

    Raises:
        TypeError: no log.
    """
    charts = charts_of(log)
    styles = "".join(f".{_class(kind)} {{ fill: var(--{_class(kind)}); "
                     f"background: var(--{_class(kind)}); }}\n" for kind in KINDS)  # fmt: skip
    title = escape(log.title)
    body = "\n".join([*map(_chart, charts), *_tables(log)])
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{STYLE}{styles}</style>
</head>
<body>
<h1>{title}</h1>
<p>{escape(_summary(log))}</p>
{body}
</body>
</html>
"""


def _summary(log: Log) -> str:
    total = sum(number for *_, number in log.counted)
    true = sum(tokens * number for tokens, _, _, number in log.counted)
    padded = sum(padded * number for _, padded, _, number in log.counted)
    verified, differ = log.verified
    told = [
        f"{count(total, 'step')}, {true} tokens",
        f"{(padded - true) / max(true, 1):.1%} padding",
    ]
    if verified:
        told.append(f"{verified} verified, of which {differ} differ")
    return "; ".join(told) + "."


def _class(kind: str) -> str:
    return kind.replace(" ", "-")


def _chart(chart: Chart) -> str:
    legend = "".join(
        f'<span><i class="{_class(kind)}"></i>{escape(KINDS[kind])}</span>' for kind in chart.kinds
    )
    rows = "\n".join(_row(bar, chart.end) for bar in chart.bars)
    left = f"<p>{escape(chart.left)}</p>" if chart.left else ""
    return f"""<section>
<h2>{escape(chart.title)}</h2>
<p>{escape(chart.about)}</p>
<div class="legend">{legend}</div>
{rows}
<div class="scale"><span>0</span><span>{chart.end:.4g} {escape(chart.unit)}</span></div>
{left}</section>"""


def _row(bar: ChartBar, end: float) -> str:
    rects = "".join(
        f'<rect class="{_class(span.kind)}" x="{span.start / end * WIDTH:.2f}" y="0" height="10" '
        f'width="{max(span.length / end * WIDTH, 0.5):.2f}"><title>{escape(span.name)}</title>'
        "</rect>"
        for span in bar.spans
    )
    label = f'<div class="label"><span>{escape(bar.label)}</span>'
    label += f'<span class="note">{escape(bar.note)}</span></div>'
    return (
        f'<div class="row">{label}<svg class="bar" viewBox="0 0 {WIDTH} 10" role="img" '
        f'preserveAspectRatio="none" aria-label="{escape(bar.label)}: {escape(bar.note)}">'
        f"{rects}</svg></div>"
    )


def _tables(log: Log) -> list[str]:
    slow = sorted(log.steps, key=lambda step: -step.host)[:SLOWEST]
    found = []
    if log.eager:
        rows = [[str(n), why] for why, n in sorted(log.eager.items(), key=lambda item: -item[1])]
        found.append(_table("Why steps ran without a graph", ["steps", "because"], rows, 1))
    if slow:
        rows = [
            [f"{s.at / 1000:.1f}", f"{s.host:.0f}", "" if s.device is None else f"{s.device:.0f}",
             str(s.spec.num_tokens), str(s.spec.num_reqs), s.key or s.mode.name, s.reason]
            for s in slow
        ]  # fmt: skip
        header = ["at ms", "host us", "device us", "tokens", "requests", "ran as", "why"]
        found.append(_table("The slowest of the last steps, on the host", header, rows, 5))
    return found


def _table(title: str, header: list[str], rows: list[list[str]], numbers: int) -> str:
    """A table that scrolls by itself where the page is narrow.

    Args:
        numbers: how many of the first columns are numbers.
    """

    def line(cells: list[str], tag: str) -> str:
        made = (f'<{tag}{" class=n" if k < numbers else ""}>{escape(cell)}</{tag}>'
                for k, cell in enumerate(cells))  # fmt: skip
        return f"<tr>{''.join(made)}</tr>"

    body = "\n".join(line(row, "td") for row in rows)
    return (
        f'<section><h2>{escape(title)}</h2>\n<div class="wide" tabindex="0"><table>\n'
        f"{line(header, 'th')}\n{body}\n</table></div></section>"
    )
