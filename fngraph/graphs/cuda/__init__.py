"""The `cuda` recorder: CUDA graphs on one pool and one capture stream."""
