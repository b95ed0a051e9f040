"""What `capture` returns: a step over bound leaves, and all that it does."""
