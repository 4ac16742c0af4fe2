"""Sharded data parallelism for smalti, on torch's FSDP2."""
