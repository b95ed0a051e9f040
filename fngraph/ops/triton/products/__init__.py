"""Triton kernels of products of few rows, in bfloat16 and in fp8."""
