"""Traced graphs: trace, purity, donation, split. Knows nothing of recorders or backends."""
