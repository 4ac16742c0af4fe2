"""Stopping in time: before the time limit of a job, and when SLURM drains the node."""
