"""From runs and checkpoints to what inference loads."""
