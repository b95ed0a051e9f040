"""Padding and true rows: what `forward` may mix, and what it may not."""
