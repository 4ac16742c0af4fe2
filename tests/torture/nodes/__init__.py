"""Groups over several nodes: see `support.nodes`."""
