"""What a run left: checkpoints, and how its attempts ended."""
