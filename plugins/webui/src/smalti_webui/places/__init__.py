"""Datasets, plugins, doctor, maintenance; samples, checkpoints, errors and comparison of runs."""
