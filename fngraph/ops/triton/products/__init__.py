"""Triton kernels of products of up to 64 rows, in floats of 16 and 32 bits and in fp8."""
