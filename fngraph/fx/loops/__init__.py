"""Loops and choices of the device: what a user calls, one node of a trace each, how it runs."""
