"""Static buffers, and the way of a batch into them."""
