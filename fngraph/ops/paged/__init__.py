"""Attention over a paged cache: the primitives, and backends that are not Triton's."""
