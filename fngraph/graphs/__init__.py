"""Static buffers, staging, capture and replay, on either recorder. Knows nothing of fx."""
