"""The dry run, the start of a run, the queue."""
