"""Faults of every kind against checkpoints, runs and plugins, each replayable by its seed: `make torture`."""
