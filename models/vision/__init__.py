"""Vision encoders as pure functions: forward(params, batch) -> rows, one an output token."""
