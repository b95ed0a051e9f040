"""Traced graphs: trace, purity, rows, donation, pieces. Knows nothing of recorders or backends.

Imports go downwards only: `rows` and `tracing` stand on the files of this folder; `donation`,
`pieces` and `blocks` stand on `tracing` too.
"""
