"""Measurements: python -m benchmarks NAME. What was measured where is in benchmarks/results."""
