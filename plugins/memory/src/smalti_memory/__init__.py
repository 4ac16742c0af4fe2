"""Training with less accelerator memory for smalti. Importing this imports no torch."""
