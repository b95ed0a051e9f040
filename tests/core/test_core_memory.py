"""`fngraph.core.memory`: what keys cost in sum, and the table of them."""

from fngraph.core import BatchDescriptor, Bytes, KeyMemory, MemoryTable, Mode
from fngraph.core.memory import ALIGN, GRAPH_BYTES, NODE_BYTES

MB = 10**6
ROWS = (
    KeyMemory(Mode.PIECEWISE, BatchDescriptor(8), Bytes(4 * MB, MB), Bytes(5 * MB, 2 * MB), 0),
    KeyMemory(Mode.FULL, BatchDescriptor(4, 4, 1), Bytes(3 * MB, MB), Bytes(0, MB // 2), 7),
    KeyMemory(Mode.FULL, BatchDescriptor(2, 2, 1), Bytes(2 * MB, 10_000)),
)


def test_the_pool_counts_once_and_graphs_add_up():
    table = MemoryTable(ROWS, pool=6 * MB)
    assert table.total == 8_500_000  # of what is captured
    assert table.estimated == 6_010_000  # the largest key's intermediates, every key's graphs
    assert MemoryTable(()).total == MemoryTable(()).estimated == 0
    assert MemoryTable(()).budget is None


def test_text_and_repr():
    table = MemoryTable(ROWS, 6 * MB, 9 * MB)
    assert table.as_text() == (
        """\
| mode      | key                                | est. pool MB | est. graph MB | pool MB | graph MB | last used, step |
|-----------|------------------------------------|-------------:|--------------:|---------|----------|-----------------|
| PIECEWISE | BatchDescriptor(8)                 |         4.00 |          1.00 | 5.00    | 2.00     | never           |
| FULL      | BatchDescriptor(4, 4, query_len=1) |         3.00 |          1.00 | 0.00    | 0.50     | 7               |
| FULL      | BatchDescriptor(2, 2, query_len=1) |         2.00 |          0.01 |         |          |                 |

"""  # noqa: E501
        "MemoryTable(2 of 3 keys: 8.50 MB, of which the pool 6.00 MB; "
        "all keys, estimated: 6.01 MB, budget 9.00 MB)"
    )
    assert repr(MemoryTable((), 5 * MB * MB)) == (
        "MemoryTable(0 of 0 keys: 5000000.00 MB, of which the pool 5000000.00 MB; "
        "all keys, estimated: 0.00 MB)"
    )


def test_a_table_is_a_value():
    assert MemoryTable(ROWS) == MemoryTable(ROWS, 0, None) != MemoryTable(ROWS, 1)
    assert hash(MemoryTable(ROWS)) == hash(MemoryTable(ROWS))


def test_what_was_measured():
    """On an H200; an estimate is made of them."""
    assert (GRAPH_BYTES, NODE_BYTES, ALIGN) == (212_992, 3072, 512)
