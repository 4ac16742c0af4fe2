"""The nodes of a launch, checked against each other. Imports no torch."""
