"""Where a pipeline's parts come from."""
