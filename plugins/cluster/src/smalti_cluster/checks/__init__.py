"""The nodes of a launch, checked against each other: before ranks start, and by `smalti doctor --nodes`."""
