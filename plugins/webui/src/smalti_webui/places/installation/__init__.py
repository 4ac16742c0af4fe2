"""This installation: plugins, the checks of smalti doctor, and caches."""
