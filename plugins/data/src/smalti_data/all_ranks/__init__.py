"""A scan of datasets by all ranks together, where they are remote."""
