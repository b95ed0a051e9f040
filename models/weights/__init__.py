"""Weights in files: by name, from folders, as adapters."""
