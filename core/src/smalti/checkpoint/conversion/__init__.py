"""Exports, and what readers of checkpoints of other trainers return."""
