"""What is in a dataset: the index, its changes, samples that cannot be used."""
