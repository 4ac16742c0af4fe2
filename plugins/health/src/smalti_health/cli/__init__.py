"""`smalti health`."""
