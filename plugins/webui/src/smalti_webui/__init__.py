"""The web page of smalti."""
