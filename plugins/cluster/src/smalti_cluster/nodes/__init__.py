"""The nodes of a launch: how they find each other, agree before ranks start, and watch each other."""
