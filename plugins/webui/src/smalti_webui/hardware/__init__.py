"""FSDP, block detection, DeepSpeed and the planner."""
