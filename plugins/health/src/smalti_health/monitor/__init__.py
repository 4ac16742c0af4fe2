"""The monitor: a process of each node that reads its GPUs, and what connects it with the ranks. Imports no torch."""
