"""Triton kernels of recurrences and of the causal convolution ahead of them."""
