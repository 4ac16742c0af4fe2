"""A run whose processes Ray places."""
