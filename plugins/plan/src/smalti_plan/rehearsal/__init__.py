"""Rehearsing a run: its own code on tensors without values, as one rank of a cluster that is not there."""
