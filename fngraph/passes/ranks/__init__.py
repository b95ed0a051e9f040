"""Passes over what processes tell each other."""
