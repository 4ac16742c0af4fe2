"""What the planner says of a run, against runs on real ranks."""
