"""What readings of GPUs mean: pure functions, without a driver, a clock or a file."""
