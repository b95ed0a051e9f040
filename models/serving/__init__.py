"""Continuous batching: requests, schedule and steps as values and pure functions."""
