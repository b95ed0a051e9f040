"""`Captured`: a step over bound leaves, and all that it does."""
