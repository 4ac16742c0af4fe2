"""Runs over several nodes, under schedulers and within time limits. Importing this imports no torch."""
