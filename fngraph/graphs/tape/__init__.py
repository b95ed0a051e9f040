"""The `tape` recorder: what a CUDA graph does to a function, without a GPU."""
