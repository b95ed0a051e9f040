"""Model families: each a module of pure functions, and the parts that they are made of."""
