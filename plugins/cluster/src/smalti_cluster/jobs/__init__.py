"""Jobs for schedulers: the script for SLURM, the manifest for Kubernetes, and what the script asks about nodes and results."""
