"""Checkpoints of other trainers in, exports out."""
