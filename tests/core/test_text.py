"""`fngraph.core.text`: aligned Markdown, folded ranges, counted nouns."""

import pytest

from fngraph.core.text import count, ranges, table


def test_table_aligns_numbers_right():
    assert table(("name", "n", "share"), [("a", 1, "5.5%"), ("long name", 10, "10%")]) == (
        "| name      |  n | share |\n"
        "|-----------|---:|------:|\n"
        "| a         |  1 |  5.5% |\n"
        "| long name | 10 |   10% |"
    )


def test_table_columns_of_mixed_cells_align_left():
    assert table(("x", "y"), [(1, "-"), ("1.2.3", 5), ("50%%", "")]) == (
        "| x     | y |\n|-------|---|\n| 1     | - |\n| 1.2.3 | 5 |\n| 50%% |   |".replace(
            "| 50%% |", "| 50%%  |"
        )
    )


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
