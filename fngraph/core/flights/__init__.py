"""What steps were: recorded specs, and the log of a run."""
