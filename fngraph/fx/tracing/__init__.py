"""What one trace of `forward` sees, and what it refuses."""
