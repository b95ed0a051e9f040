"""Encoders: which graphs there are, and which items run in which."""
