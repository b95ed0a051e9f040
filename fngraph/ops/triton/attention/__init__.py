"""Triton kernels of attention, over pages, latent rows and sequences; and of its cache."""
