"""Ranks that make no progress: when that is a hang, which rank the others wait for, and the stacks of all of them."""
