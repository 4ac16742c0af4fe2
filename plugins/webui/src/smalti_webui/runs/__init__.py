"""The list of runs, and one run: numbers, curves, events, log, requests."""
