"""Pages about what runs need and leave: datasets, samples, checkpoints, errors, comparison, plugins, doctor, caches."""
