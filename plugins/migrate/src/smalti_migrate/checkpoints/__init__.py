"""Checkpoints of any known format, read in a process of its own and written as smalti's or as plain safetensors."""
