"""How entries are read: several in one request, several requests at once, and copies on a drive of the node."""
