"""Triton kernels, loaded when one first runs.

`attention`, `products` and `recurrent` are of primitives and of products of few rows; `fused`,
`highest` and `reducing` of rows; `backends` names those of primitives. The other files are what
kernels are written and launched with.
"""
