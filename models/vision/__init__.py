"""Vision encoders as pure functions: forward(params, batch) -> rows, a row for each output token."""
