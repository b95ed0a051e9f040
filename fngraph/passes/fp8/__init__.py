"""Passes over what is in fp8: what rounds, and linear layers."""
