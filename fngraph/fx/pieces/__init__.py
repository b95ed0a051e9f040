"""A traced graph cut at its primitives: pieces, their code, the memory that they need."""
