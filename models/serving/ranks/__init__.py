"""Processes that serve together: who tells whom what, sizes of batches that meet, stages."""
