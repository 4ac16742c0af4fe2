"""`smalti doctor`."""
