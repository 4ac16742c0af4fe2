"""The checks of one node. Each returns a section of the report."""
