"""Closed formulas: memory, traffic and time of a way to train, in microseconds. They rank; a rehearsal counts."""
