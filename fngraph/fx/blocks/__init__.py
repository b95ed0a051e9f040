"""Bodies that are traced once and stamped for each call that would leave the same."""
