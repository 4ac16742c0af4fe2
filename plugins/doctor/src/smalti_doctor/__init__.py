"""What this node has, and what is wrong with it; and measurements of its devices, for the planner and the checks of nodes."""
