"""Triton kernels of the primitives, loaded when one first runs."""
