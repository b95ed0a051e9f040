"""Training as pure functions: weights and optimizer in, weights and optimizer out."""
