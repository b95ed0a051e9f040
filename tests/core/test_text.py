"""`fngraph.core.text`: aligned Markdown, folded ranges, counted nouns."""

import pytest

from fngraph.core import text
from fngraph.core.text import count, did_you_mean, ranges, table


def test_table_aligns_numbers_right():
    assert table(("name", "n", "share"), [("a", 1, "5.5%"), ("long name", 10, "10%")]) == (
        "| name      |  n | share |\n"
        "|-----------|---:|------:|\n"
        "| a         |  1 |  5.5% |\n"
        "| long name | 10 |   10% |"
    )


@pytest.mark.parametrize(
    ("cell", "right"),
    [("12", True), ("1.5", True), ("5.5%", True)]
    + [(cell, False) for cell in ("1.2.3", "5%%", "-", "", "a1")],
)
def test_what_counts_as_a_number(cell, right):
    lines = table(("wide header",), [(cell,), (1,)]).splitlines()
    assert lines[1].endswith(":|") is right
    assert lines[2] == f"| {cell.rjust(11) if right else cell.ljust(11)} |"


def test_table_without_rows():
    assert table(("ab", "c"), []) == "| ab | c |\n|----|---|"


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], ""),
        ([5], "5"),
        ([1, 2], "1, 2"),
        ([1, 2, 3], "1, 2, 3"),
        ([1, 2, 3, 4], "1..4"),
        ([1, 2, 4, 8, 16, 24, 32, 40], "1, 2, 4, 8..40 by 8"),
        ([1, 3, 5, 7, 9, 10], "1..9 by 2, 10"),
        ([8, 16, 24, 32, 48, 64, 80, 96], "8..32 by 8, 48..96 by 16"),
    ],
)
def test_ranges(numbers, text):
    assert ranges(iter(numbers)) == text


def test_count():
    assert (count(0, "key"), count(1, "key"), count(2, "key")) == ("0 keys", "1 key", "2 keys")


def test_the_nearest_name():
    known = ["Sinks", "bidirectional", "sinks"]
    assert did_you_mean("sink", known) == " Did you mean 'Sinks'?"
    assert did_you_mean("BIDIRECTIONEL", known) == " Did you mean 'bidirectional'?"
    assert did_you_mean(7, known) == did_you_mean("sinks", ()) == ""


def test_tables_are_tables_in_html_too():
    made = text.html("a <head>\n\n" + text.table(("name", "us"), [("x & y", 1.5), ("z", 20)]))
    assert made.startswith("<pre>a &lt;head&gt;</pre>\n<table>")
    assert '<th style="text-align: right">us</th>' in made
    assert '<td style="text-align: left">x &amp; y</td>' in made and made.count("<tr>") == 3


def test_a_cell_with_bars_and_lines_of_its_own_is_a_cell_still():
    made = text.table(("why", "n"), [("int | float\nis no dim", 3), ("plain", 12)])
    assert made.count("\n") == 3 and r"int \| float is no dim" in made
    shown = text.html(made)
    assert shown.count("<td") == 4 and ">int | float is no dim<" in shown
