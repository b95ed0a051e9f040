"""What a verified step goes by: which calls are, what they came under, and the thread in which they
are compared."""
